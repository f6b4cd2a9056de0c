# SPDX-License-Identifier: Apache-2.0
"""Watches a program train: which modules it calls, what autograd keeps, when a step is done.

A step is done when an optimizer has stepped. A program that changes its parameters by hand has
none: then each backward pass counts.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from backfold import _C
from backfold._inspect import Observer
from backfold._replay import ModelCall

# The name of the whole model in the paths of a report; what has no path is outside of all modules.
MODEL = "model"
# So many passes without an optimizer are more than anyone accumulates gradients over.
LONGEST_ACCUMULATION = 64
# Of modules, before one backward pass. Each is recorded with copies of its arguments.
MOST_CALLS = 256


@dataclass
class Pass:
    """One backward pass and what came before it."""

    report: dict[str, Any]
    calls: list[ModelCall]  # those that can be run again
    obstacles: list[str]  # why others cannot
    model: torch.nn.Module | None


class Done(BaseException):
    """Ends the program; no ``except Exception`` of its own is in the way."""


class Watch:
    """Counts steps of training between start() and stop().

    `on_done` is called, once, when `steps` steps are done; it runs inside of the program.
    """

    def __init__(self, steps: int, on_done: Callable[[], None]) -> None:
        self._wanted = steps
        self._on_done = on_done
        self._observer = Observer()
        self._opened: Any = None  # the hooks on autograd's stack while the observer is open
        self._mixed = False  # whether it has been for more than one pass
        self._depth = 0  # of calls of modules
        self._in_backward = False
        self._optimizers: Counter[int] = Counter()
        self._handles: list[Any] = []
        self._originals: list[tuple[str, Any]] = []
        self._called: dict[torch.nn.Module, None] = {}  # not inside another module's call
        self._unnamed = False  # whether modules were called since places were named last
        self._running: ModelCall | None = None
        self._recording: list[ModelCall] = []  # calls that have ended
        self._last_step = 0.0
        self._finished = False
        self.passes = 0  # backward passes
        self.hidden_calls = 0  # under hooks of the program's own
        self.step_seconds: list[float] = []
        self.largest: Pass | None = None

    @property
    def steps(self) -> int:
        """Steps done by the busiest optimizer; where there is none, backward passes."""
        return max(self._optimizers.values(), default=self.passes)

    @property
    def by_optimizer(self) -> bool:
        return bool(self._optimizers)

    def start(self) -> None:
        self._handles += [
            register_module_forward_pre_hook(self._module_begins),
            register_module_forward_hook(self._module_ends, always_call=True),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        ]
        for name in ("backward", "grad"):
            original = getattr(torch.autograd, name)
            self._originals.append((name, original))
            setattr(torch.autograd, name, self._around_backward(original))

    def stop(self) -> None:
        self._close()
        while self._handles:
            self._handles.pop().remove()
        while self._originals:
            setattr(torch.autograd, *self._originals.pop())

    # Modules

    def _module_begins(self, module: torch.nn.Module, args: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth > 1 or self._in_backward or not torch.is_grad_enabled():
            return
        if module not in self._called:
            self._called[module] = None
            self._unnamed = True
            # Only hooks of the module itself are given keyword arguments; they see its next call.
            self._handles += [
                module.register_forward_pre_hook(self._record, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._recorded, always_call=True),
            ]
        if self._opened is None:
            self._open(module)

    def _module_ends(self, module: torch.nn.Module, args: object, result: object) -> None:
        if not torch.compiler.is_compiling():
            self._depth = max(self._depth - 1, 0)

    def _record(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict) -> None:
        # The first pass tells which modules are called; the second and later ones are recorded.
        outermost = self._depth == 1 and self._opened is not None
        if outermost and self.passes > 0 and len(self._recording) < MOST_CALLS:
            self._running = ModelCall(module, fraction=1.0)
            self._running.begin(args, kwargs)

    def _recorded(self, module: torch.nn.Module, args: object, result: object) -> None:
        if self._running is not None and self._depth == 0:  # it follows _module_ends
            self._running.end(result)
            self._recording.append(self._running)
            self._running = None

    def _model(self) -> torch.nn.Module | None:
        """What contains all modules that are called and have parameters."""
        roots = [module for module in self._called if next(module.parameters(), None) is not None]
        inside = {child for module in roots for child in module.modules() if child is not module}
        roots = [module for module in roots if module not in inside]
        if len(roots) < 2:
            return roots[0] if roots else None
        around = _smallest_around(roots)
        if around is not None:
            return around
        names = Counter(type(module).__name__ for module in roots)
        found = torch.nn.ModuleDict()
        for index, module in enumerate(roots):
            name = type(module).__name__
            found[f"{name}{index}" if names[name] > 1 else name] = module
        return found

    # Blocks

    def _open(self, module: torch.nn.Module) -> None:
        if _top_hooks() is not None:  # they would take ours off the stack when they go
            self.hidden_calls += 1
            return
        if self._unnamed and (model := self._model()) is not None:
            self._observer.name(torch.nn.ModuleDict({MODEL: model}))
            self._unnamed = False
        self._observer.__enter__()
        self._opened = _top_hooks()
        _C.module_begins(module)  # the observer's own hooks see what is called from now on

    def _close(self) -> bool:
        """Whether what was observed is one pass: our hooks must be on top of the stack."""
        if self._opened is None:
            return False
        if _top_hooks() != self._opened:
            self._mixed = True
            return False
        self._observer.__exit__()
        self._opened = None
        mixed, self._mixed = self._mixed, False
        return not mixed

    # Backward and optimizers

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            inside_forward = bool(kwargs.get("create_graph"))
            if self._in_backward or inside_forward or self._depth > 0:
                return original(*args, **kwargs)
            observed = self._close()
            self._in_backward = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._in_backward = False
            self._pass_done(observed)
            return result

        return watched

    def _pass_done(self, observed: bool) -> None:
        self.passes += 1
        calls, self._recording = self._recording, []
        if observed:
            self._keep_largest(calls)
        if not self._optimizers and self.passes >= max(self._wanted, LONGEST_ACCUMULATION):
            self._finish()

    def _keep_largest(self, calls: list[ModelCall]) -> None:
        report = self._observer.report().to_dict()
        ready = [call for call in calls if call.ready]
        known = self.largest
        better = known is None or (
            (len(ready) > 0, report["unique_bytes"])
            >= (len(known.calls) > 0, known.report["unique_bytes"])
        )
        if better:
            obstacles = list(dict.fromkeys(call.reason for call in calls if not call.ready))
            self.largest = Pass(report, ready, obstacles, self._model())

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.passes == 0 or self._in_backward:
            return
        now = time.perf_counter()
        if self._optimizers[id(optimizer)]:
            self.step_seconds.append(now - self._last_step)
        self._last_step = now
        self._optimizers[id(optimizer)] += 1
        if self.steps >= self._wanted:
            self._finish()

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self.stop()
            self._on_done()
        raise Done


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _smallest_around(modules: list[torch.nn.Module]) -> torch.nn.Module | None:
    """The smallest module in this process that contains all of these; None if there is none."""
    found = None
    for one in gc.get_objects():
        # Not isinstance(): it would ask objects that load what they stand for when asked.
        if issubclass(type(one), torch.nn.Module) and "_modules" in vars(one):
            parts = set(one.modules())
            if parts.issuperset(modules) and (found is None or len(parts) < found[0]):
                found = len(parts), one
    return None if found is None else found[1]
