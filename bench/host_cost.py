# SPDX-License-Identifier: Apache-2.0
"""What a steady step costs the host: watching operations, bookkeeping, packing, unpacking.

    bench/run host                      the CPU, and the GPU if there is one
    bench/run host --device cuda        the GPU alone
    bench/run host --only models        or: saved, watched, memory
    bench/run host --json FILE          all figures
    bench/run host --tiny               few runs of small models, to check that it still runs

Saved tensors and watched operations: chains of one operation on 256 elements, whose kernels take
next to no time. Microseconds per operation, forward and backward apart, best of many runs, one
thread. Each tanh saves its result; `empty` is a pair of C functions that pass the tensor through,
the cost of torch's hooks alone. A packed save and its unpack contain one launch each; `one kernel`
is an operation that is little else. The operation under no_grad is a sum, which has a recipe.

Watched operations save nothing, so that only the callback sees them. With derive=True it records
those that have a recipe; that is the last column. The last line is three operations that save two
tensors: GELU its input, a product its result, which is packed or derived.

Whole models: a 24-layer GPT-2 under autocast and, where torchvision is installed, Swin-T, with one
sample, when a GPU waits for its host; narrow ones on a CPU, so that kernels take little time there,
too. Milliseconds of the host, the first quartile of several runs. `per operator` spreads what a
forward takes beyond plain's over its operators.

Memory, on a CPU only: 2^26 fp32 elements in GB/s of those elements, the fastest run. A large tensor
that is allocated anew comes as fresh pages; while a controller exists, the memory of packets and of
decoded tensors is reused.
"""

import argparse
import contextlib
import gc
import itertools
import json
import pathlib
import time
import typing
from collections.abc import Callable

import backfold
import torch
from torch import Tensor, nn
from torch.nn import functional

PARTS = ["saved", "watched", "models", "memory"]

Scopes = dict[str, contextlib.AbstractContextManager]


class Size(typing.NamedTuple):
    length: int = 200  # of a chain
    runs: int = 40
    model_runs: int = 20
    layers: int = 24
    large: int = 1 << 26  # elements
    large_runs: int = 7


TINY = Size(length=4, runs=2, model_runs=4, layers=1, large=1 << 20, large_runs=2)


class Pair(typing.NamedTuple):
    forward: float
    backward: float

    def __sub__(self, other: "Pair") -> "Pair":
        return Pair(self.forward - other.forward, self.backward - other.backward)

    @property
    def both(self) -> float:
        return self.forward + self.backward


class Loss(typing.NamedTuple):
    model: nn.Module
    of: Callable[[], Tensor]


WATCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view (no recipe)": lambda y, x: y.view(-1),
    "round (no recipe)": lambda y, x: y.round(),
    "add, tensor": lambda y, x: y + x,
    "add, number": lambda y, x: y + 1.0,
    "add in place": lambda y, x: y.add_(x),
    "neg": lambda y, x: y.neg(),
    "clone": lambda y, x: y.clone(),
    "round, gelu, mul": lambda y, x: functional.gelu(y.round()) * x,
}


def wait(device: str) -> None:
    """An idle GPU: what was launched before would keep the host from launching more."""
    if device == "cuda":
        torch.cuda.synchronize()


def host_time(
    scope: contextlib.AbstractContextManager, forward: Callable[[], Tensor], device: str
) -> Pair:
    """Seconds. On a GPU, what was launched may still run."""
    wait(device)
    start = time.perf_counter()
    with scope:
        value = forward()
    between = time.perf_counter()
    wait(device)
    again = time.perf_counter()
    value.backward()
    return Pair(between - start, time.perf_counter() - again)


def best(
    size: Size, x: Tensor, scopes: Scopes, operation: Callable[..., Tensor], gradients: bool = True
) -> dict[str, Pair]:
    """Microseconds per operation, by scope."""

    def chain() -> Tensor:
        y = x * 1
        with torch.set_grad_enabled(gradients):
            for _ in range(size.length):
                y = operation(y, x)
        return y.sum() if gradients else x.sum()

    runs: dict[str, list[Pair]] = {name: [] for name in scopes}
    for _ in range(size.runs):  # in turn, so that all run under the same conditions
        for name, scope in scopes.items():
            runs[name].append(host_time(scope, chain, x.device.type))
    scale = 1e6 / size.length
    return {name: Pair(*(min(c) * scale for c in zip(*p, strict=True))) for name, p in runs.items()}


def one_kernel(size: Size, x: Tensor) -> float:
    """Microseconds of an operation without autograd that writes into memory that is there."""
    y, shortest = x.detach().clone(), float("inf")
    for _ in range(size.runs):
        wait(x.device.type)
        start = time.perf_counter()
        for _ in range(size.length):
            y.neg_()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest / size.length * 1e6


def fold(**options: object) -> backfold.Controller:
    return backfold.Controller(bits=4, **options)


def measure_saved(size: Size, x: Tensor) -> dict:
    scopes = {
        "plain": contextlib.nullcontext(),
        "empty": torch.autograd.graph.saved_tensors_hooks(itertools.repeat, next),
        "passed": fold(min_bytes=1 << 40),
        "packed": fold(min_bytes=0, derive=False),
    }
    times = best(size, x, scopes, lambda y, x: y.tanh())
    watched = {name: scopes[name] for name in ("plain", "passed")}
    nothing = best(size, x, watched, lambda y, x: y.round())
    quiet = best(size, x, watched, lambda y, x: y + x, gradients=False)
    # Of an operation that saves, watching is a part as well.
    costs = {
        "an operation that saves nothing": nothing["passed"] - nothing["plain"],
        "an operation under no_grad": quiet["passed"] - quiet["plain"],
        "torch's empty hooks": times["empty"] - times["plain"],
        "a save below min_bytes": times["passed"] - times["plain"],
        "a packed save, its unpack": times["packed"] - times["plain"],
    }
    kernel = one_kernel(size, x)
    print(f"{x.device.type}: microseconds beyond plain{'forward':>22}{'backward':>10}")
    for name, each in costs.items():
        print(f"  {name:36}{each.forward:10.2f}{each.backward:10.2f}")
    print(f"  {'(one kernel)':36}{kernel:10.2f}", flush=True)
    return {name: each._asdict() for name, each in (times | costs).items()} | {"kernel": kernel}


def measure_watched(size: Size, x: Tensor) -> dict:
    print(f"{x.device.type}: microseconds per watched operation, forward and backward")
    print(f"  {'':24}{'plain':>8}{'derive=False':>14}{'derive=True':>13}{'recorded':>10}")
    found = {}
    for name, operation in WATCHED.items():
        scopes = {
            "plain": contextlib.nullcontext(),
            "stored": fold(min_bytes=0, derive=False),
            "derived": fold(min_bytes=0),
        }
        times = best(size, x, scopes, operation)
        plain, stored, derived = (pair.both for pair in times.values())
        print(
            f"  {name:24}{plain:8.2f}{stored:14.2f}{derived:13.2f}{derived - stored:+10.2f}",
            flush=True,
        )
        found[name] = {scope: pair._asdict() for scope, pair in times.items()}
    return found


def gpt2(size: Size, device: str) -> Loss:
    import transformers

    width = 1024 if device == "cuda" else 64
    config = transformers.GPT2Config(
        n_layer=size.layers,
        n_embd=width,
        n_head=max(4, width // 64),
        vocab_size=128,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device(device):
        model = transformers.GPT2LMHeadModel(config).train()
        tokens = torch.randint(128, (1, 64))

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(tokens, labels=tokens, use_cache=False).loss

    return Loss(model, loss)


def swin(size: Size, device: str) -> Loss | None:
    try:
        from torchvision.models import swin_t, swin_transformer
    except ImportError:
        return None
    with torch.device(device):
        if device == "cuda":
            model, image = swin_t(), torch.rand(1, 3, 224, 224)
        else:
            depths = [2, 2, 6, 2] if size.layers > 1 else [1] * 4
            model = swin_transformer.SwinTransformer(
                [4, 4], embed_dim=12, depths=depths, num_heads=[1] * 4, window_size=[2, 2]
            )
            image = torch.rand(1, 3, 32, 32)
    model.train()
    return Loss(model, lambda: model(image).sum())


def operators(loss: Loss) -> int:
    """Calls of one forward that no other operator makes."""
    with torch.autograd.profiler.profile() as profile:
        loss.of()
    return sum(event.cpu_parent is None for event in profile.function_events)


def measure_model(size: Size, loss: Loss, device: str) -> tuple[dict[str, Pair], int]:
    """Milliseconds by mode, and the number of operators."""
    scopes: Scopes = {
        "plain": contextlib.nullcontext(),
        "passed": backfold.Controller(loss.model, bits=4, min_bytes=1 << 40),
        "bits=None": backfold.Controller(loss.model, bits=None),
        "default": backfold.Controller(loss.model, bits=4),
        "all packed": backfold.Controller(loss.model, bits=4, min_bytes=0),
    }
    runs: dict[str, list[Pair]] = {name: [] for name in scopes}
    for _ in range(size.model_runs):
        for mode, scope in scopes.items():
            runs[mode].append(host_time(scope, loss.of, device))
            loss.model.zero_grad(set_to_none=True)
    times = {
        mode: Pair(
            *(sorted(column)[size.model_runs // 4] * 1e3 for column in zip(*pairs, strict=True))
        )
        for mode, pairs in runs.items()
    }
    return times, operators(loss)


def measure_models(size: Size, device: str) -> dict:
    print(f"{device}: milliseconds of the host, one sample")
    found = {}
    for name, build in ((f"GPT-2, {size.layers} layers", gpt2), ("Swin-T", swin)):
        loss = build(size, device)
        if loss is None:
            print(f"  {name}: needs torchvision")
            continue
        times, count = measure_model(size, loss, device)
        plain = times["plain"]
        heading = f"{name}, {count} operators"
        print(f"  {heading:28}{'forward':>9}{'backward':>10}{'/ plain':>9}{'us per operator':>17}")
        for mode, each in times.items():
            per_operator = (each - plain).forward / count * 1e3
            print(
                f"    {mode:26}{each.forward:9.2f}{each.backward:10.2f}"
                f"{each.both / plain.both:9.2f}{per_operator:17.2f}",
                flush=True,
            )
        found[name] = {mode: each._asdict() for mode, each in times.items()} | {"operators": count}
    return found


def measure_memory(size: Size) -> dict[str, float]:
    """GB/s of the elements of a large tensor, by what makes them anew."""
    source = torch.rand(size.large)
    target = torch.empty_like(source).zero_()
    packet = backfold.pack(source, bits=4)

    def rate(work: Callable[[], object]) -> float:
        shortest = float("inf")
        for _ in range(size.large_runs):
            start = time.perf_counter()
            result = work()
            shortest = min(shortest, time.perf_counter() - start)
            del result
        return source.nbytes / shortest / 1e9

    found = {
        "copy_ into memory that is there": rate(lambda: target.copy_(source)),
        "clone": rate(source.clone),
        "unpack": rate(lambda: backfold.unpack(packet)),
    }
    controller = fold()
    found["unpack while a controller exists"] = rate(lambda: backfold.unpack(packet))
    del controller
    print(f"cpu: GB/s of {size.large} fp32 elements")
    for name, each in found.items():
        print(f"  {name:36}{each:10.1f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="one of them alone")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=pathlib.Path, help="also write all figures here")
    parser.add_argument("--tiny", action="store_true", help="few runs of small models")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    size = TINY if arguments.tiny else Size()
    torch.set_num_threads(1)
    gc.disable()  # a collection would fall into any of the runs
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    results: dict[str, dict] = {}
    for device in [arguments.device] if arguments.device else devices:
        start = time.perf_counter()
        x = torch.rand(256, device=device, requires_grad=True)
        found = results[device] = {}
        if "saved" in arguments.only:
            found["saved"] = measure_saved(size, x)
        if "watched" in arguments.only:
            found["watched"] = measure_watched(size, x)
        if "models" in arguments.only:
            found["models"] = measure_models(size, device)
        if "memory" in arguments.only and device == "cpu":
            found["memory"] = measure_memory(size)
        print(f"({time.perf_counter() - start:.0f} s)", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
