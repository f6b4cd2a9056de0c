# SPDX-License-Identifier: Apache-2.0
"""``backfold doctor``: what is installed, and whether it computes what it should."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import click
import torch

from backfold import _C, _build_info
from backfold._torch_version import release
from backfold.cli import _self_test
from backfold.cli._output import (
    console,
    json_option,
    mebibytes,
    print_json,
    progress,
    table,
    threads,
)

OPTIONAL = ("triton", "transformers", "lightning", "torch-geometric")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {
        "backfold": _build_info.VERSION,
        "built_for_torch": _build_info.TORCH_RELEASE,
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "python": platform.python_version(),
        "system": f"{platform.system()}, {platform.machine()}",
        **{name: _version(name) for name in OPTIONAL},
    }


def torch_support() -> tuple[bool, str]:
    """Whether this torch was tested. One that does not work at all fails at import."""
    span = f"{_build_info.OLDEST_TORCH} to {_build_info.NEWEST_TORCH}"
    if release(torch.__version__) <= release(_build_info.NEWEST_TORCH):
        return True, f"supported ({span})"
    return False, f"newer than any that was tested ({span}), allowed by BACKFOLD_ANY_TORCH=1"


def devices() -> list[dict[str, Any]]:
    name = platform.processor() or platform.machine()
    found: list[dict[str, Any]] = [{"device": "cpu", "name": name, "what": threads()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        memory = f"{mebibytes(properties.total_memory)} MiB"
        found.append(
            {"device": f"cuda:{index}", "name": properties.name, "what": f"{memory}, {capability}"}
        )
    return found


def backends() -> tuple[dict[str, Any], list[str]]:
    """What was built and what is chosen, and what is wrong with that."""
    problems = []
    try:
        chosen = _C.usual_host_target()
    except RuntimeError as error:
        chosen = None
        problems.append(str(error))
    cuda = "built" if _C.built_with_cuda() else "not built"
    gpus = torch.cuda.device_count()
    if gpus and not _C.built_with_cuda():
        problems.append(
            f"torch sees {gpus} GPU{'s' if gpus > 1 else ''}, but this build has no CUDA kernels; "
            "build Backfold where a CUDA toolkit (nvcc) is: pip install --no-build-isolation ."
        )
    return {
        "simd_targets": _C.simd_targets(),
        "chosen_on_the_cpu": chosen,
        "BACKFOLD_TARGET": os.environ.get("BACKFOLD_TARGET", "not set"),
        "cuda_kernels": cuda,
    }, problems


def self_test() -> list[_self_test.Result]:
    found = []
    targets = _self_test.backends()
    with progress() as bar:
        task = bar.add_task("codecs", total=len(_self_test.NAMES) * len(targets))
        for name in _self_test.NAMES:
            for backend in targets:
                found.append(_self_test.check(name, backend))
                bar.advance(task)
    return found


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check this installation: versions, devices, backends, every codec.

    Each codec packs and unpacks tensors of each floating-point type, at several widths and in
    several memory orders, on each SIMD target of this machine and on each GPU. The bytes must be
    those of the scalar reference. Exits with 1 if anything is wrong.

    \b
    Examples:
      backfold doctor
      backfold doctor --json > doctor.json
      BACKFOLD_TARGET=AVX2 backfold doctor    what another choice of SIMD target would be
    """
    supported, support = torch_support()
    chosen, problems = backends()
    results = self_test()
    for result in results:
        problems += [f"{result.codec} on {result.backend}: {one}" for one in result.failures]
    if as_json:
        print_json(
            {
                "ok": not problems,
                "problems": problems,
                "versions": versions(),
                "torch_supported": supported,
                "devices": devices(),
                "backends": chosen,
                "self_test": [vars(result) for result in results],
            }
        )
    else:
        _show(support, chosen, results, problems)
    sys.exit(1 if problems else 0)


def _show(
    support: str, chosen: dict[str, Any], results: list[_self_test.Result], problems: list[str]
) -> None:
    out = console()
    rows = table("versions", "", "")
    for name, version in versions().items():
        text = f"{version}, {support}" if name == "torch" else version or "none"
        rows.add_row(name.replace("_", " "), text)
    out.print(rows)
    rows = table("devices", "device", "name", "")
    for one in devices():
        rows.add_row(one["device"], one["name"], one["what"])
    out.print(rows)
    rows = table("backends", "", "")
    for name, value in chosen.items():
        text = ", ".join(value) if isinstance(value, list) else value
        if name != "BACKFOLD_TARGET":
            name = name.replace("_", " ")
        rows.add_row(name, text or "none")
    out.print(rows)
    out.print(_self_test_table(results))
    for problem in problems:
        out.print(f"[red]wrong:[/red] {problem}", soft_wrap=True)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        out.print(f"[red]{count} found[/red]")
    else:
        out.print("[green]all is well[/green]")


def _self_test_table(results: list[_self_test.Result]) -> Any:
    targets = list(dict.fromkeys(result.backend for result in results))
    rows = table("codecs against their scalar reference", "codec", *targets, right=targets)
    if not targets:
        rows.add_row("no backend beside the reference is built")
    for name in _self_test.NAMES if targets else ():
        cells = []
        for result in results:
            if result.codec != name:
                continue
            good = f"{result.cases} equal"
            bad = f"[red]{len(result.failures)} wrong[/red]"
            cells.append(bad if result.failures else good)
        rows.add_row(name, *cells)
    return rows
