# SPDX-License-Identifier: Apache-2.0
"""Step time against memory: ten budgets beside checkpointing, on one workload after the other.

    bench/run frontier                      Llama 1.1B, GPT-2 medium, BERT-large, ResNet-50 on a GPU
    bench/run frontier llama --budgets 4    one of them, four budgets
    bench/run frontier --exact              bits=None: tensors are made again, none is rounded
    bench/run frontier --peak               targets are peaks of a step, not what is held
    bench/run frontier --tiny               tiny sizes on the CPU
    bench/run frontier --json F --plot P    also writes every row, and a plot (needs matplotlib)

Plain runs first, then checkpointing of every block, of every second one, and of every block but for
its matrix products (selective), then the default settings (or bits=None alone), then budgets,
spaced evenly by ratio from what these hold down to an eighth of it; one that is impossible is named
with the lowest possible. With --peak, what a step takes besides is added to each. Held is what
forward leaves allocated, peak the most allocated in a step: by the allocator's count on a GPU, by
the profiler's on a CPU, in a step of its own. Time is the median of some steps on a GPU, the
fastest of them on one thread of a CPU.
"""

import argparse
import contextlib
import gc
import pathlib
import time
import typing

import backfold
import measure
import torch
from models import BUILDERS, Workload, checkpointed
from modes import selective
from results import Results

NAMES = ["llama", "gpt2", "bert", "resnet50"]
LEAST = 1 / 8  # of what is held without a budget
HEAD = ["step ms", "/ plain", "held MiB", "peak MiB", "remade ms", "sent MiB"]
PROBED = 5  # steps after which plans are made and, where products were added, made again


class Row(typing.NamedTuple):
    mode: str
    step_ms: float
    held_mib: float
    peak_mib: float
    remade_ms: float = 0.0
    sent_mib: float = 0.0  # offloaded, as the budget needs


def memory_on_cpu(workload: Workload, scope: measure.Scope) -> tuple[float, float]:
    """MiB that forward leaves allocated, and the most in a step."""
    options = {"activities": [torch.profiler.ProfilerActivity.CPU], "profile_memory": True}
    with torch.profiler.profile(**options) as run:
        with scope():
            loss = workload.loss()
        with torch.profiler.record_function("between"):
            pass
        loss.backward()
    for parameter in workload.model.parameters():
        parameter.grad = None
    events = run.profiler.kineto_results.events()
    between = min(event.start_ns() for event in events if event.name() == "between")
    now = held = most = 0
    for event in sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda one: one.start_ns()
    ):
        now += event.nbytes()
        most = max(most, now)
        held = now if event.start_ns() < between else held
    return held / measure.MIB, most / measure.MIB


def measured(mode: str, workload: Workload, scope: measure.Scope, steps: int) -> Row:
    measure.free("cuda" if measure.on_gpu(workload) else "cpu")
    if measure.on_gpu(workload):
        cost = measure.steps(workload, scope, warmups=PROBED + 2, count=steps)
        return Row(mode, cost.step_ms, cost.held_mib, cost.peak_mib)
    times = []
    for _ in range(PROBED + 2 + steps):
        start = time.perf_counter()
        with scope():
            loss = workload.loss()
        loss.backward()
        times.append((time.perf_counter() - start) * 1e3)
        del loss
    held, peak = memory_on_cpu(workload, scope)
    return Row(mode, min(times[PROBED + 2 :]), held, peak)


def cells(row: Row, plain: Row) -> list[str]:
    times = [f"{row.step_ms:.1f}", f"{row.step_ms / plain.step_ms:.2f}"]
    figures = (row.held_mib, row.peak_mib, row.remade_ms, row.sent_mib)
    return times + [f"{figure:,.2f}" for figure in figures]


def say(head: str, columns: list[str]) -> None:
    print(f"  {head:24}" + "".join(f"{column:>11}" for column in columns), flush=True)


def run(name: str, arguments: argparse.Namespace) -> dict:
    device = "cpu" if arguments.tiny else "cuda"
    with torch.device(device):
        torch.manual_seed(0)
        workload = BUILDERS[name](arguments.tiny)
    print(f"\n{name}: {workload.title}")
    say("", HEAD)
    exact = {"bits": None} if arguments.exact else {}
    small = {"min_bytes": 0} if arguments.tiny else {}
    rows: list[Row] = []
    refused: list[str] = []

    def add(mode: str, scope: measure.Scope, fold: backfold.Controller | None = None) -> None:
        row = measured(mode, workload, scope, arguments.steps)
        if fold:
            report = fold.report().to_dict()
            plans = [plan for plan in (report["plan"], report["remade"]) if plan]
            row = row._replace(
                remade_ms=report["remade"]["ms"] if report["remade"] else 0.0,
                sent_mib=sum(plan["sent_bytes"] for plan in plans) / measure.MIB,
            )
        rows.append(row)
        say(mode, cells(rows[-1], rows[0]))

    add("plain", contextlib.nullcontext)
    for every, mode in ((1, "checkpoint"), (2, "checkpoint, every 2nd")):
        with checkpointed(workload, every):
            add(mode, contextlib.nullcontext)
    with selective(workload):
        add("checkpoint, selective", contextlib.nullcontext)
    fold = backfold.Controller(workload.model, **exact, **small)
    add("bits=None" if arguments.exact else "default", lambda: fold, fold)
    report = fold.report().to_dict()
    held = report["held_bytes"]
    taken = report["timeline"]["peak"]["folded"]["bytes"]  # what a CPU's peak counts
    if device == "cuda":
        taken = round(rows[-1].peak_mib * measure.MIB)
    kind, besides = ("peak", taken - held) if arguments.peak else ("budget", 0)
    del fold
    for i in range(arguments.budgets):
        target = besides + round(held * LEAST ** ((i + 1) / arguments.budgets))
        gc.collect()
        fold = backfold.Controller(workload.model, **{kind: target}, **exact, **small)
        try:
            add(f"{kind} {target / measure.MIB:,.2f} MiB", lambda fold=fold: fold, fold)
        except ValueError as error:
            refused.append(str(error))
            print(f"  {error}")
            break
    return {
        "name": name,
        "title": workload.title,
        "rows": [row._asdict() for row in rows],
        "refused": refused,
    }


def plot(results: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4.5 * len(results), 4), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        plain = result["rows"][0]
        for group, marker in (("checkpoint", "s"), ("budget", "o"), ("peak", "o"), ("", "x")):
            rows = [
                row
                for row in result["rows"]
                if row["mode"].startswith(group)
                and (group or not row["mode"].startswith(("checkpoint", "budget", "peak")))
            ]
            if not rows:
                continue
            axis.plot(
                [row["peak_mib"] for row in rows],
                [row["step_ms"] / plain["step_ms"] for row in rows],
                marker=marker,
                linestyle="-" if marker == "o" else "",
                label=group or "no budget",
            )
            for row in rows:
                text = row["mode"].removeprefix(group).removesuffix(" MiB").strip(", ")
                axis.annotate(
                    text or "every block",
                    (row["peak_mib"], row["step_ms"] / plain["step_ms"]),
                    (4, 4),
                    textcoords="offset points",
                    fontsize=7,
                )
        axis.margins(0.15)
        axis.set(title=result["name"], xlabel="peak, MiB", ylabel="step / plain")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench/run frontier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(NAMES))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--exact", action="store_true", help="bits=None")
    parser.add_argument("--peak", action="store_true", help="targets are peaks of a step")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8, help="that are timed")
    parser.add_argument("--json", type=pathlib.Path, help="file for every row")
    parser.add_argument("--plot", help="file for a plot")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.workloads if name not in BUILDERS]
    if unknown:
        parser.error(f"workload must be one of {', '.join(BUILDERS)}, got {unknown[0]!r}")
    if arguments.tiny:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        parser.error("without a GPU only --tiny runs")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    file = Results("bench/run frontier", arguments.json)
    results = []
    for name in arguments.workloads or NAMES:
        found = run(name, arguments)
        results.append(found)
        rows = [Row(**row) for row in found["rows"]]
        shown = [[row.mode, *cells(row, rows[0])] for row in rows]
        file.add(name, ["", *HEAD], shown, figures=found)
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
