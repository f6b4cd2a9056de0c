# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of real models: plain, folded, checkpointed, offloaded.

    bench/run h200                          every workload: plain, bits=None, 4 bits planned
    bench/run h200 resnet50 bert            two of them
    bench/run h200 swin_t --modes fold stored checkpoint save_on_cpu
    bench/run h200 bert --modes fold offload exact_offload save_on_cpu
    bench/run h200 llama --report --profile where the bytes are, where the time goes
    bench/run h200 swin_t --apart           what the host takes, what the GPU takes
    bench/run h200 --tiny                   tiny sizes on the CPU, to check that it all still runs

Plain runs first, in the same process. Held is what forward leaves allocated; peak is the most
allocated at any point in a step. `exact` is bits=None, `fold` the default settings, `stored` the
same with derive=False, `uniform` one width everywhere, `offload` and `exact_offload` the default
settings and bits=None with offload=True. Rows marked `given` and the targets come
from figures.py, which names their source.
"""

import argparse
import collections
import contextlib
import importlib.metadata
import json
import math
import pathlib
import platform
import re
import sys
import time
import traceback

import measure
import torch
from figures import FIGURES, Cost
from models import BUILDERS, Workload, checkpointed

FOLDED: dict[str, dict] = {
    "exact": {"bits": None},
    "fold": {},
    "stored": {"derive": False},
    "uniform": {"adaptive": False},
    "offload": {"offload": True},
    "exact_offload": {"bits": None, "offload": True},
}
MODES = [*FOLDED, "checkpoint", "save_on_cpu"]
PROFILE_ROWS = 30
NAMESPACES = re.compile(r"void |at::native::|backfold::(core|cuda)::|\(anonymous namespace\)::")


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    names = ["torch", "backfold", "torchvision", "transformers", "torch-geometric"]
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        found["CUDA"] = torch.version.cuda
        found["device"] = torch.cuda.get_device_name()
    return found


# ---- One workload ------------------------------------------------------------------------------


class Run:
    """The rows of one workload, printed as they are measured."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        self.name, self.arguments = name, arguments
        self.given = None if arguments.tiny else FIGURES[name]
        self.costs: dict[str, Cost] = {}  # by mode
        self.base: float | None = None  # MiB allocated after plain's steps
        self.result: dict = {"name": name, "modes": {}, "failed": []}

    def start(self, title: str) -> None:
        heading = f"{'step ms':>9}{'/ plain':>9}{'held MiB':>11}{'peak MiB':>11}"
        say(f"\n{self.name}: {title}", f"  {'':20}" + heading)
        for mode, cost in self.given_costs():
            self.row(mode, cost, self.given.plain.step_ms)

    def given_costs(self) -> list[tuple[str, Cost]]:
        if self.given is None:
            return []
        costs = [(mode, getattr(self.given, mode)) for mode in ("plain", "checkpoint", "gact")]
        return [(f"{mode}, given", cost) for mode, cost in costs if cost]

    def measured(self, mode: str, cost: Cost) -> None:
        self.costs[mode] = cost
        known = {key: value for key, value in cost._asdict().items() if not math.isnan(value)}
        self.result["modes"][mode] = known
        plain = self.costs.get("plain")
        self.row(mode, cost, plain.step_ms if plain else math.nan)

    def row(self, mode: str, cost: Cost, plain_ms: float) -> None:
        sizes = ["-" if math.isnan(mib) else f"{mib:,.1f}" for mib in cost[1:]]
        line = f"  {mode:20}{cost.step_ms:9.1f}{cost.step_ms / plain_ms:9.2f}"
        say(line + "".join(f"{size:>11}" for size in sizes))

    def fail(self, what: str, details: str) -> None:
        self.result["failed"].append(what)
        say(f"  {self.name}: {what} FAILED", details)

    def left(self, when: str) -> None:
        """Reports what is allocated beyond what plain left."""
        if not self.arguments.tiny:
            allocated = torch.cuda.memory_allocated() / measure.MIB
            if self.base is None:
                self.base = allocated
            elif allocated > self.base + 1:
                say(f"  {allocated - self.base:,.1f} MiB more allocated {when} than after plain")

    def over_floor(self) -> str:
        """Peaks above what a step needs when nothing is held on the GPU."""
        floor = self.given.floor if self.given else None
        if "save_on_cpu" in self.costs:
            floor = self.costs["save_on_cpu"].peak_mib
        if floor is None or math.isnan(floor):
            return ""
        costs = [*self.given_costs(), *self.costs.items()]
        over = [f"{mode} {cost.peak_mib - floor:,.0f}" for mode, cost in costs]
        return f"  peak above that of save_on_cpu, {floor:,.0f} MiB: {'; '.join(over)}"

    def verdicts(self) -> list[str]:
        """Which targets the folded step met."""
        fold, plain, given = self.costs.get("fold"), self.costs.get("plain"), self.given
        if fold is None or plain is None or given is None or self.arguments.bits != 4:
            return []
        checks = []
        if given.held_target:
            checks.append(("held", fold.held_mib, given.held_target, "MiB"))
        if given.ratio_target:
            checks.append(("step", fold.step_ms / plain.step_ms, given.ratio_target, "of plain"))
        if given.peak_target:
            others = [other.peak_mib for other in (given.checkpoint, given.gact) if other]
            checks.append(("peak", fold.peak_mib, min(others), "MiB"))
        return [
            f"{what} {value:,.{2 if limit < 10 else 0}f} {unit}, target {limit:,}: "
            + ("met" if value <= limit else "MISSED")
            for what, value, limit, unit in checks
        ]


def run_fold(run: Run, workload: Workload, mode: str) -> None:
    import backfold

    arguments = run.arguments
    options = {"bits": arguments.bits, **FOLDED[mode]}
    fold = backfold.Controller(workload.model, **options)
    cost = measure.steps(workload, lambda: fold)
    report = fold.report().to_dict()
    if arguments.tiny:
        cost = cost._replace(held_mib=report["held_bytes"] / measure.MIB)
    run.measured(mode, cost)
    run.left("between folded steps")

    result = measure.faith(workload, lambda: fold)
    run.result.setdefault("faith", {})[mode] = result._asdict()
    run.result.setdefault("report", {})[mode] = {
        key: value for key, value in report.items() if key not in ("sites", "timeline")
    }
    sizes = [
        f"{key.removesuffix('_bytes')} {value / measure.MIB:,.1f}"
        for key, value in report.items()
        if key.endswith("_bytes") and value is not None
    ]
    say(
        f"  gradient error {result.gradient_error:.4f} (plain against itself: "
        f"{result.gradient_noise:.1e}); loss {result.loss:.6f}",
        f"  report, MiB: {', '.join(sizes)}",
    )
    if not measure.forward_is_exact(result):
        run.fail("exact forward", f"  {result}")
    if arguments.report:
        say_report(report["sites"], arguments.report)
    if arguments.profile:
        say_profile(workload, fold)
    say_apart(run, workload, mode, lambda: fold)


def say_apart(run: Run, workload: Workload, mode: str, scope: measure.Scope) -> None:
    if not run.arguments.apart:
        return
    found = measure.apart(workload, scope)
    run.result.setdefault("apart", {})[mode] = found._asdict()
    say(
        f"  {mode}: forward {found.host_forward:.1f} ms of the host, {found.gpu_forward:.1f} of "
        f"the GPU; backward {found.gpu_backward:.1f} of the GPU"
    )


def run_mode(run: Run, workload: Workload, mode: str) -> None:
    if mode in FOLDED:
        run_fold(run, workload, mode)
    elif mode == "plain":
        run.measured(mode, measure.steps(workload, contextlib.nullcontext))
        say_apart(run, workload, mode, contextlib.nullcontext)
    elif mode == "checkpoint":
        if workload.block:
            with checkpointed(workload):
                run.measured(mode, measure.steps(workload, contextlib.nullcontext))
    else:  # only for its peak: it takes many times plain's time
        scope = torch.autograd.graph.save_on_cpu
        run.measured(mode, measure.steps(workload, scope, warmups=0, count=2))


def run_workload(name: str, arguments: argparse.Namespace) -> dict:
    run = Run(name, arguments)
    device = "cpu" if arguments.tiny else "cuda"
    workload = None
    for mode in ["build", "plain", *arguments.modes]:
        try:
            if mode == "build":
                torch.manual_seed(7)
                start = time.perf_counter()
                with torch.device(device):
                    workload = BUILDERS[name](arguments.tiny)
                run.start(f"{workload.title} (built in {time.perf_counter() - start:.1f} s)")
            else:
                run_mode(run, workload, mode)
        except Exception:
            run.fail(mode, traceback.format_exc())
            if mode == "build":
                break
            workload.model.zero_grad(set_to_none=True)
        measure.free(device)
        if mode != "build":
            run.left(f"after {mode}")
    run.result["verdicts"] = run.verdicts()
    for line in (run.over_floor(), "".join(f"  {verdict}\n" for verdict in run.verdicts())):
        if line:
            say(line.rstrip())
    del workload
    measure.free(device)
    return run.result


# ---- Longer answers ----------------------------------------------------------------------------


def say_report(sites: list[dict], count: int) -> None:
    """The largest rows of the report, summed over modules, then one by one."""
    mib = measure.MIB
    heading = f"{'saves':>7}{'saved':>10}{'unique':>10}{'held':>10}  MiB, kind, bits, reason"
    for keys in (("op", "slot"), ("module", "op", "slot", "occurrence")):
        sums: dict = collections.defaultdict(lambda: [0, 0, 0, 0])
        for site in sites:
            label = " ".join(str(site[key]) for key in keys)
            group = sums[(label, site["kind"], site["bits"], site["reason"])]
            for i, key in enumerate(("saves", "saved_bytes", "unique_bytes", "held_bytes")):
                group[i] += site[key]
        say(f"\n  {' '.join(keys):52}" + heading)
        for key, group in sorted(sums.items(), key=lambda item: -item[1][3])[:count]:
            label, kind, bits, reason = key
            columns = "".join(f"{size / mib:10,.1f}" for size in group[1:])
            say(f"  {label[-51:]:52}{group[0]:7}{columns}  {kind} {bits} {reason}")
    say("")


def say_profile(workload: Workload, fold) -> None:
    """Kernels by what they take beyond plain's."""
    plain = {name: row for name, *row in measure.kernels(workload, contextlib.nullcontext)}
    folded = {name: row for name, *row in measure.kernels(workload, lambda: fold)}
    own = {name: row for name, row in folded.items() if "backfold" in name}
    total = [sum(row[1] for row in part.values()) for part in (folded, own, plain)]
    say("\n  kernels {:.1f} ms, backfold's {:.1f} of these; plain {:.1f} ms".format(*total))
    more = {name: row[1] - plain.get(name, (0, 0.0))[1] for name, row in folded.items()}
    for name in sorted(more, key=more.__getitem__, reverse=True)[:PROFILE_ROWS]:
        calls, milliseconds = folded[name]
        before = plain.get(name, (0, 0.0))[0]
        short = NAMESPACES.sub("", name)[:90]
        say(f"  {more[name]:+8.2f} of {milliseconds:6.2f} ms, {calls:4} calls ({before})  {short}")
    say("")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench/run h200",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(BUILDERS))
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["exact", "fold"], help="beside plain"
    )
    parser.add_argument(
        "--bits", type=lambda text: None if text == "none" else int(text), default=4
    )
    parser.add_argument("--report", type=int, nargs="?", const=20, metavar="ROWS")
    parser.add_argument(
        "--profile", action="store_true", help="kernels by what they take beyond plain's"
    )
    parser.add_argument("--apart", action="store_true", help="times of host and GPU on their own")
    parser.add_argument("--json", type=pathlib.Path, help="also write all figures here")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args()
    unknown = set(arguments.workloads) - set(BUILDERS)
    if unknown:
        parser.error(f"unknown workload {', '.join(unknown)}; known: {', '.join(BUILDERS)}")
    if arguments.tiny and arguments.apart:
        parser.error("--apart needs a GPU; --tiny runs on the CPU")
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --tiny runs on the CPU")

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    found = versions()
    say(", ".join(f"{name} {version}" for name, version in found.items()))
    results = []
    for name in arguments.workloads or BUILDERS:
        results.append(run_workload(name, arguments))
        if arguments.json:  # after each workload, so that an interrupted run keeps its results
            content = {"versions": found, "bits": arguments.bits, "workloads": results}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    failed = [f"{r['name']} ({', '.join(r['failed'])})" for r in results if r["failed"]]
    say("", f"failed: {', '.join(failed)}" if failed else "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
