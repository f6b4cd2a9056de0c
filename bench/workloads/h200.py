# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of real models: plain, folded, checkpointed, compiled, offloaded.

    bench/run h200                          every workload: plain, bits=None, 4 bits planned
    bench/run h200 resnet50 bert            two of them
    bench/run h200 --modes all --json steps.json --plot steps.png
    bench/run h200 swin_t --modes fold stored checkpoint save_on_cpu
    bench/run h200 bert --modes fold offload exact_offload save_on_cpu
    bench/run h200 llama --report --profile where the bytes are, where the time goes
    bench/run h200 swin_t --apart           what the host takes, what the GPU takes
    bench/run h200 --tiny                   tiny sizes on the CPU, to check that it all still runs

Plain runs first, in the same process. Held is what forward leaves allocated; peak is the most
allocated at any point in a step. `exact` is bits=None, `fold` the default settings, `fold8`,
`fold3` and `fold2` other means, `stored` the default with derive=False, `uniform` one width
everywhere, `offload` and `exact_offload` the default settings and bits=None with offload=True.
`checkpoint` runs every block again, `selective` all of it but matrix products and convolutions,
`compile` is torch.compile, `compile_budget` the same with activation_memory_budget=0.5. A mode that
fails is reported with its error, and the others run. Rows marked `given` and the targets come from
figures.py, which names their source.
"""

import argparse
import contextlib
import importlib.metadata
import json
import pathlib
import platform
import sys
import time
import traceback

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "zoo"))

import measure
import torch
from answers import say_profile, say_report
from models import BUILDERS, Workload
from modes import ALL, FOLDED, MODES, NEED_BLOCKS, OTHERS
from plots import plot
from rows import Run, say
from tqdm import tqdm
from vision_libraries import find_vision_libraries


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


def measured(run: Run, workload: Workload, scope: measure.Scope, warmups: int | None = None):
    arguments = run.arguments
    warmups = arguments.warmups if warmups is None else warmups
    return measure.steps(workload, scope, warmups, arguments.steps)


def run_fold(run: Run, workload: Workload, mode: str) -> None:
    import backfold

    arguments = run.arguments
    options = {"bits": arguments.bits, **FOLDED[mode]}
    fold = backfold.Controller(workload.model, **options)
    cost = measured(run, workload, lambda: fold)
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


def run_other(run: Run, workload: Workload, mode: str) -> None:
    other = OTHERS[mode]
    if mode in NEED_BLOCKS and not workload.block:
        return
    with other.around(workload):
        if other.slow:
            cost = measure.steps(workload, other.forward, warmups=1, count=2)
        else:
            if other.compiles:
                start = time.perf_counter()
                measure.steps(workload, other.forward, warmups=0, count=1)
                seconds = time.perf_counter() - start
                run.result.setdefault("compile_s", {})[mode] = seconds
                say(f"  {mode}: compiled in {seconds:.1f} s")
            cost = measured(run, workload, other.forward)
    run.measured(mode, cost)


def run_mode(run: Run, workload: Workload, mode: str) -> None:
    if mode in FOLDED:
        run_fold(run, workload, mode)
    elif mode in OTHERS:
        run_other(run, workload, mode)
    else:
        run.measured(mode, measured(run, workload, contextlib.nullcontext))
        say_apart(run, workload, mode, contextlib.nullcontext)


def run_workload(name: str, arguments: argparse.Namespace, bar: tqdm) -> dict:
    run = Run(name, arguments)
    device = "cpu" if arguments.tiny else "cuda"
    workload = None
    modes = ["build", "plain", *arguments.modes]
    for mode in modes:
        bar.set_description(f"{name}, {mode}")
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
                bar.update(len(modes))
                break
            workload.model.zero_grad(set_to_none=True)
        measure.free(device)
        if mode != "build":
            run.left(f"after {mode}")
        bar.update()
    run.result["verdicts"] = run.verdicts()
    for line in (run.over_floor(), "".join(f"  {verdict}\n" for verdict in run.verdicts())):
        if line:
            say(line.rstrip())
    del workload
    measure.free(device)
    return run.result


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run h200",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(BUILDERS))
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=[*MODES, "all"],
        default=["exact", "fold"],
        metavar="MODE",
        help=f"beside plain: {', '.join(MODES)}, or all: {', '.join(ALL)}",
    )
    parser.add_argument(
        "--bits", type=lambda text: None if text == "none" else int(text), default=4
    )
    parser.add_argument("--steps", type=int, default=measure.STEPS, help="that are timed")
    parser.add_argument(
        "--warmups", type=int, default=measure.WARMUPS, help="steps before these; plans take 3"
    )
    parser.add_argument("--report", type=int, nargs="?", const=20, metavar="ROWS")
    parser.add_argument(
        "--profile", action="store_true", help="kernels by what they take beyond plain's"
    )
    parser.add_argument("--apart", action="store_true", help="times of host and GPU on their own")
    parser.add_argument("--json", type=pathlib.Path, help="also write all figures here")
    parser.add_argument("--plot", type=pathlib.Path, help="a picture of step against peak")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args()
    unknown = set(arguments.workloads) - set(BUILDERS)
    if unknown:
        parser.error(f"unknown workload {', '.join(unknown)}; known: {', '.join(BUILDERS)}")
    for name, least in (("steps", 1), ("warmups", 0)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(arguments, name)}")
    if arguments.tiny and (arguments.apart or arguments.plot):
        parser.error("--apart and --plot need a GPU; --tiny runs on the CPU")
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --tiny runs on the CPU")
    if "all" in arguments.modes:
        arguments.modes = ALL
    return arguments


def main() -> int:
    arguments = parsed()
    if arguments.tiny:
        find_vision_libraries()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    found = versions()
    say(", ".join(f"{name} {version}" for name, version in found.items()))
    results = []
    names = arguments.workloads or list(BUILDERS)
    bar = tqdm(total=len(names) * (len(arguments.modes) + 2), unit="mode")
    for name in names:
        results.append(run_workload(name, arguments, bar))
        content = {
            "versions": found,
            "bits": arguments.bits,
            # Results are published: folders of this machine are left out.
            "command": " ".join(["bench/run h200", *(pathlib.Path(a).name for a in sys.argv[1:])]),
            "workloads": results,
        }
        if arguments.json:  # after each workload, so that an interrupted run keeps its results
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    bar.close()
    if arguments.plot:
        plot(content, arguments.plot)
    failed = [f"{r['name']} ({', '.join(r['failed'])})" for r in results if r["failed"]]
    say("", f"failed: {', '.join(failed)}" if failed else "nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
