# SPDX-License-Identifier: Apache-2.0
"""Cost of a probe: time and peak of the steps at which sensitivities are measured.

    bench/run probes                    ResNet-50 and BERT-large
    bench/run probes swin_t gpt2        other workloads of bench/run h200
    bench/run probes --json FILE        also writes the table, for documents
    bench/run probes --tiny             tiny sizes on the CPU, to check that it all still runs

Probes run at steps 2, 6 and 10: the call of the model is recorded there and rerun when the next
step begins. The cost of a probe is the time of these two steps beyond the median of the others, in
plain training steps; the first one also warms up kernels for its part of the batch.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import time

import backfold
import measure
import torch
from models import BUILDERS
from results import Results

PROBED = (2, 6, 10)
STEPS = 16
HEAD = ["", *(f"probe at step {step}, plain steps" for step in PROBED)]
HEAD += ["of the first 1,000 steps", "of 1,000 later steps", "peak / plain's"]


def probe(name: str, target: dict[str, float], fraction: float, tiny: bool) -> list[str]:
    """Prints what probes of one workload cost. Returns the row of the table."""
    device = "cpu" if tiny else "cuda"
    measure.free(device)
    torch.manual_seed(7)
    with torch.device(device):
        workload = BUILDERS[name](tiny)
    plain = measure.steps(workload, contextlib.nullcontext)
    measure.free(device)
    fold = backfold.Controller(
        workload.model,
        **target,
        probe_steps=PROBED,
        probe_every=None,
        probe_fraction=fraction,
        min_bytes=0 if tiny else 16384,
    )
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=measure.LEARNING_RATE)
    costs = {i: measure.step(workload, optimizer, lambda: fold) for i in range(1, STEPS + 1)}
    probed = {i for step in PROBED for i in (step, step + 1)}
    after = [costs[i] for i in range(PROBED[-1] + 2, STEPS + 1)]
    before = [costs[i] for i in range(3, STEPS + 1) if i not in probed]
    steady = statistics.median(cost.step_ms for cost in before)
    print(f"{name}: plain {plain.step_ms:.1f} ms, peak {plain.peak_mib:,.0f} MiB", flush=True)
    cells = [name]
    for step in PROBED:
        extra = costs[step].step_ms + costs[step + 1].step_ms - 2 * steady
        peak = max(costs[step].peak_mib, costs[step + 1].peak_mib)
        print(
            f"  probe at step {step}: {extra:.1f} ms, {extra / plain.step_ms:.2f} plain steps; "
            f"peak {peak:,.0f} MiB, peak / plain's {peak / plain.peak_mib:.2f}"
        )
        cells.append(f"{extra / plain.step_ms:.2f}")
    extra = costs[PROBED[-1]].step_ms + costs[PROBED[-1] + 1].step_ms - 2 * steady
    first = costs[PROBED[0]].step_ms + costs[PROBED[0] + 1].step_ms - 2 * steady
    shares = [f"{(first + 3 * extra) / steady / 10:.2f}%", f"{extra / steady / 10:.2f}%"]
    print(f"  share of time: first 1,000 steps {shares[0]}, later {shares[1]}")
    held = max(cost.held_mib for cost in after)
    report = fold.report().to_dict()
    planned = report["plan"]["held_bytes"] / measure.MIB
    print(
        f"  with the plan: step {statistics.median(c.step_ms for c in after) / plain.step_ms:.2f} "
        f"of plain's, held {held:,.1f} MiB per allocator, {planned:,.1f} planned, "
        f"{report['held_bytes'] / measure.MIB:,.1f} counted; error energy "
        f"{report['plan']['error']:.3g}, at one width {report['plan']['uniform_error']:.3g}"
    )
    peak = max(cost.peak_mib for cost in costs.values())
    return [*cells, *shares, f"{peak / plain.peak_mib:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", choices=[[], *BUILDERS], default=[])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--bits", type=float, default=4)
    kind.add_argument("--budget", type=float, metavar="MIB", help="most to hold, instead of --bits")
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--json", type=pathlib.Path, help="also write the table here")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        sys.exit("bench/run probes needs a GPU; --tiny runs on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    target = {"bits": arguments.bits}
    if arguments.budget is not None:
        target = {"budget": int(arguments.budget * measure.MIB)}
    results, rows = Results("bench/run probes", arguments.json), []
    for name in arguments.workloads or ["resnet50", "bert"]:
        start = time.perf_counter()
        rows.append(probe(name, target, arguments.fraction, arguments.tiny))
        results.add("probes", HEAD, rows)
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
