# SPDX-License-Identifier: Apache-2.0
"""Host time per operation in a steady step: hooks, bookkeeping, packing, unpacking.

    bench/run host

Chains of one operation on tiny tensors, whose kernels take next to no time. Best of many runs, one
thread.

Saved tensors: each tanh saves its result. `empty` is a pair of C functions that pass the tensor
through: the cost of torch's hooks alone. `passed` is Backfold with everything below min_bytes:
bookkeeping alone. `folded` packs and unpacks 256 elements each.

Watched operations save nothing, so that only the callback sees them. With derive=True it records
those that have a recipe; that is the last column. The last line is three operations that save two
tensors: GELU its input, a product its result, which is packed or derived.

Whole models: a 24-layer GPT-2 and, where torchvision is installed, Swin-T, with one sample; narrow
ones on a CPU, so that kernels take little time there, too. Times are the host's.
"""

import contextlib
import itertools
import time
import typing
from collections.abc import Callable

import backfold
import torch
from torch import Tensor, nn
from torch.nn import functional

LENGTH, RUNS, MODEL_RUNS = 200, 100, 40


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


def step(
    x: Tensor, scope: contextlib.AbstractContextManager, operation: Callable[..., Tensor]
) -> float:
    start = time.perf_counter()
    with scope:
        y = x * 1
        for _ in range(LENGTH):
            y = operation(y, x)
    y.backward(x.detach())
    return time.perf_counter() - start


def best(
    x: Tensor,
    scopes: dict[str, Callable[[], contextlib.AbstractContextManager]],
    operation: Callable[..., Tensor],
) -> dict[str, float]:
    """Microseconds per operation, by scope."""
    times = dict.fromkeys(scopes, float("inf"))
    for _ in range(RUNS):  # in turn, so that all run under the same conditions
        for name, scope in scopes.items():
            times[name] = min(times[name], step(x, scope(), operation))
    return {name: seconds / LENGTH * 1e6 for name, seconds in times.items()}


def controller(**options: object) -> Callable[[], backfold.Controller]:
    fold = backfold.Controller(bits=4, **options)
    return lambda: fold


def print_saved(x: Tensor) -> None:
    scopes = {
        "plain": contextlib.nullcontext,
        "empty": lambda: torch.autograd.graph.saved_tensors_hooks(itertools.repeat, next),
        "passed": controller(min_bytes=1 << 40),
        "folded": controller(min_bytes=0, derive=False),
    }
    times = best(x, scopes, lambda y, x: y.tanh())
    print(f"{x.device.type}: microseconds per saved tensor, forward and backward")
    for name, each in times.items():
        print(f"  {name:8}{each:8.2f}   over empty {each - times['empty']:+7.2f}")


def print_watched(x: Tensor) -> None:
    print(f"{x.device.type}: microseconds per watched operation, forward and backward")
    print(f"  {'':24}{'plain':>8}{'derive=False':>14}{'derive=True':>13}{'recorded':>10}")
    for name, operation in WATCHED.items():
        scopes = {
            "plain": contextlib.nullcontext,
            "stored": controller(min_bytes=0, derive=False),
            "derived": controller(min_bytes=0),
        }
        plain, stored, derived = best(x, scopes, operation).values()
        print(f"  {name:24}{plain:8.2f}{stored:14.2f}{derived:13.2f}{derived - stored:+10.2f}")


def gpt2(device: str) -> Loss:
    import transformers

    width = 1024 if device == "cuda" else 64
    config = transformers.GPT2Config(
        n_layer=24,
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
    return Loss(model, lambda: model(tokens, labels=tokens).loss)


def swin(device: str) -> Loss | None:
    try:
        from torchvision.models import swin_t, swin_transformer
    except ImportError:
        return None
    with torch.device(device):
        if device == "cuda":
            model, image = swin_t(), torch.rand(1, 3, 224, 224)
        else:
            model = swin_transformer.SwinTransformer(
                [4, 4], embed_dim=12, depths=[2, 2, 6, 2], num_heads=[1] * 4, window_size=[2, 2]
            )
            image = torch.rand(1, 3, 32, 32)
    model.train()
    return Loss(model, lambda: model(image).sum())


def host_times(loss: Loss, scope: contextlib.AbstractContextManager) -> list[float]:
    """Milliseconds of forward and backward. On a GPU, what was launched may still run."""
    if next(loss.model.parameters()).is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with scope:
        value = loss.of()
    forward = time.perf_counter()
    value.backward()
    end = time.perf_counter()
    loss.model.zero_grad(set_to_none=True)
    return [(forward - start) * 1e3, (end - forward) * 1e3]


def print_models(device: str) -> None:
    print(f"{device}: milliseconds of the host, forward and backward of one sample")
    for name, build in (("GPT-2, 24 layers", gpt2), ("Swin-T", swin)):
        loss = build(device)
        if loss is None:
            print(f"  {name}: needs torchvision")
            continue
        scopes = {
            "plain": contextlib.nullcontext(),
            "passed": backfold.Controller(loss.model, bits=4, min_bytes=1 << 40),
            "bits=None": backfold.Controller(loss.model, bits=None),
            "default": backfold.Controller(loss.model, bits=4),
            "all packed": backfold.Controller(loss.model, bits=4, min_bytes=0),
        }
        runs: dict[str, list[list[float]]] = {name: [] for name in scopes}
        for _ in range(MODEL_RUNS):
            for mode, scope in scopes.items():
                runs[mode].append(host_times(loss, scope))
        print(f"  {name}")
        for mode, times in runs.items():
            columns = zip(*times, strict=True)
            forward, backward = (sorted(column)[MODEL_RUNS // 4] for column in columns)
            print(f"    {mode:12}{forward:8.2f}{backward:8.2f}")


def main() -> None:
    torch.set_num_threads(1)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        x = torch.rand(256, device=device, requires_grad=True)
        print_saved(x)
        print_watched(x)
        print_models(device)


if __name__ == "__main__":
    main()
