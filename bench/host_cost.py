# SPDX-License-Identifier: Apache-2.0
"""Host time per saved tensor in a steady step: hooks, bookkeeping, packing, unpacking.

    bench/run host

Each tanh in a chain on tiny tensors saves its result. `empty` is a pair of C functions that pass
the tensor through: the cost of torch's hooks alone. `passed` is Backfold with everything below
min_bytes: bookkeeping alone. `folded` packs and unpacks 256 elements each, so its kernels take next
to no time. Best of many runs, one thread.
"""

import contextlib
import itertools
import time

import backfold
import torch

LENGTH, RUNS = 200, 60


def step(x: torch.Tensor, scope: contextlib.AbstractContextManager) -> float:
    start = time.perf_counter()
    y = x
    with scope:
        for _ in range(LENGTH):
            y = y.tanh()
    y.backward(torch.ones_like(y))
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        x = torch.randn(256, device=device, requires_grad=True)
        passed = backfold.Controller(bits=4, min_bytes=1 << 40)
        folded = backfold.Controller(bits=4, min_bytes=0)
        scopes = {
            "plain": contextlib.nullcontext,
            "empty": lambda: torch.autograd.graph.saved_tensors_hooks(itertools.repeat, next),
            "passed": lambda passed=passed: passed,
            "folded": lambda folded=folded: folded,
        }
        times = dict.fromkeys(scopes, float("inf"))
        for _ in range(RUNS):  # in turn, so that all run under the same conditions
            for name, scope in scopes.items():
                times[name] = min(times[name], step(x, scope()))
        print(f"{device}: microseconds per saved tensor, forward and backward")
        for name, seconds in times.items():
            each = seconds / LENGTH * 1e6
            over = (seconds - times["empty"]) / LENGTH * 1e6
            print(f"  {name:8}{each:8.2f}   over empty {over:+7.2f}")


if __name__ == "__main__":
    main()
