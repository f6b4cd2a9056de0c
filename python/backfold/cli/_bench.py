# SPDX-License-Identifier: Apache-2.0
"""``backfold bench``: codecs and one small training on this machine."""

from __future__ import annotations

import click
import torch

from backfold import _C
from backfold.cli import _codec_speed, _small_training
from backfold.cli._output import (
    console,
    json_option,
    mebibytes,
    milliseconds,
    print_json,
    progress,
    table,
    threads,
)

STEPS = {"cpu": 40, "cuda": 150}


@click.command()
@click.option("--device", help="cpu, cuda or cuda:1. Default: a GPU if Backfold can use it.")
@click.option("--quick", is_flag=True, help="One small size and few steps: does it run at all?")
@json_option
def bench(device: str | None, quick: bool, as_json: bool) -> None:
    """Measure this machine: codecs against a copy, and one small training.

    Takes half a minute on an idle CPU with two cores. Each codec packs and unpacks a tensor of
    random numbers; a copy of the same tensor to new memory says what the machine allows. A
    transformer of two layers is trained plain, folded exactly and with 4 bits, from the same
    parameters and on the same batches.

    \b
    Examples:
      backfold bench
      backfold bench --device cpu --json > cpu.json
    """
    chosen = _device(device)
    sizes = _codec_speed.MEBIBYTES[chosen.type][: 1 if quick else None]
    steps = _small_training.WARM_UP + 3 if quick else STEPS[chosen.type]
    speeds = []
    with progress() as bar:
        task = bar.add_task("codecs", total=len(_codec_speed.CODECS) * len(sizes))
        for name in _codec_speed.CODECS:
            for size in sizes:
                speeds.append(_codec_speed.measure(name, size, chosen))
                bar.advance(task)
        task = bar.add_task("training", total=steps)
        trained = _small_training.train(chosen, steps, lambda: bar.advance(task))
    if as_json:
        print_json(
            {
                "device": _name(chosen),
                "target": _target(chosen),
                "codecs": [vars(speed) for speed in speeds],
                "training": [vars(result) for result in trained],
            }
        )
        return
    _show(chosen, speeds, trained)


def _device(given: str | None) -> torch.device:
    usable = torch.cuda.is_available() and _C.built_with_cuda()
    try:
        device = torch.device(given or ("cuda" if usable else "cpu"))
    except RuntimeError:
        raise click.UsageError(f"--device must be cpu, cuda or cuda:1, got {given!r}") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise click.UsageError(f"--device must be a CPU or a CUDA GPU, got {given!r}")
    if not torch.cuda.is_available():
        raise click.UsageError(f"--device {given}: torch sees no GPU here")
    if not _C.built_with_cuda():
        raise click.UsageError(f"--device {given}: this build of Backfold has no CUDA kernels")
    return device


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {threads()}"


def _target(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else _C.usual_host_target()


def _show(
    device: torch.device,
    speeds: list[_codec_speed.Speed],
    trained: list[_small_training.Result],
) -> None:
    out = console()
    out.print(f"{_name(device)}, kernels for {_target(device)}")
    numbers = ("MiB", "times smaller", "pack, GB/s", "unpack, GB/s", "pack / copy", "unpack / copy")
    title = "codecs: bytes of the tensor per second, and time / time of a copy"
    rows = table(title, "codec", *numbers, right=numbers)
    previous = None
    for one in speeds:
        rows.add_row(
            one.codec if one.codec != previous else "",
            mebibytes(one.source_bytes),
            f"{one.ratio:.1f}",
            f"{one.source_bytes / one.pack_seconds / 1e9:,.2f}",
            f"{one.source_bytes / one.unpack_seconds / 1e9:,.2f}",
            f"{one.pack_seconds / one.copy_seconds:.2f}",
            f"{one.unpack_seconds / one.copy_seconds:.2f}",
        )
        previous = one.codec
    out.print(rows)
    plain = trained[0]
    numbers = ("held, MiB", "/ plain", "peak, MiB", "step, ms", "/ plain ms", "loss")
    title = f"a transformer of two layers, {plain.steps} steps"
    rows = table(title, "setting", *numbers, right=numbers)
    for one in trained:
        rows.add_row(
            one.setting,
            mebibytes(one.held_bytes),
            f"{one.held_bytes / plain.held_bytes:.2f}",
            mebibytes(one.peak_bytes),
            milliseconds(one.step_seconds),
            f"{one.step_seconds / plain.step_seconds:.2f}",
            f"{one.loss:.4f}",
        )
    out.print(rows)
    out.print(
        "held: between forward and backward. peak: the most allocated at any point of a step, "
        "beyond what was before. step: median. "
        f"loss: mean of the last {_small_training.LAST} steps.",
        soft_wrap=True,
    )
