# SPDX-License-Identifier: Apache-2.0
"""Folding without a change to the training loop: each call of the model is a block."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from backfold import _C
from backfold._attached_class import CALLS, attach_class, detach_class, fold_of
from backfold._check import CheckResult
from backfold._controller import Controller
from backfold._options import UNSET, Unset

_attached_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
IDLE_SECONDS = 10.0  # after which a call without gradients gives memory back that steps reuse
_observed = threading.local()  # nothing is folded while inspect() looks


class Fold(Controller):
    """A Controller whose block is opened by each call of its model; `attach` makes it.

    ``with fold:`` around the call and the loss still works, and folds what the loss saves as well.
    """

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        self._is_attached = False
        self._thread: int | None = None  # that has the block open
        self._pauses = 0
        self._told: set[str] = set()
        super().__init__(model, **options)

    @property
    def is_attached(self) -> bool:
        """Whether calls of the model are folded."""
        return self._is_attached

    def detach(self) -> None:
        """From now on, calls of the model are not folded. Backward of earlier ones still works."""
        if self._is_attached:
            self._is_attached = False
            _attached_models.discard(self._model)
            detach_class(self._model)

    def attach(self, methods: Iterable[str] = CALLS) -> None:
        """Folds calls of the model again, after detach(). `methods` are those that count as one."""
        _refuse_attached(self._model)
        attach_class(self._model, self, methods)
        _attached_models.add(self._model)
        self._is_attached = True

    def __enter__(self) -> Fold:
        outer, self._thread = self._thread, threading.get_ident()
        try:
            if self.steps == 0 and not self._held_open:
                self._core.expect_enterable()
                self._list_model()  # it may have been moved or given adapters since
            super().__enter__()  # a probe may run the model again
        except BaseException:
            self._thread = outer
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            super().__exit__(*exception)
        finally:
            self._thread = None

    def state_dict(self) -> dict[str, Any]:
        with self._paused():  # what a probe runs again is no step
            return super().state_dict()

    def check(self, step: Callable[[], torch.Tensor], repeats: int = 8) -> CheckResult:
        with self._paused():  # plain runs are plain, and the others have a block of their own
            return super().check(step, repeats)

    def open_for_call(self, model: torch.nn.Module) -> bool:
        """Opens the block for a call of the attached model, if it is one to fold."""
        if not self._folds(model):
            if not torch.is_grad_enabled():  # evaluation, which may go on for hours
                _C.give_back_idle_memory(IDLE_SECONDS)
            return False
        self.__enter__()
        return True

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def _folds(self, model: torch.nn.Module) -> bool:
        """Whether a call that begins now is a block of its own."""
        if not (self._is_attached and torch.is_grad_enabled()) or self._pauses:
            return False
        if model is not self._model:  # a copy that shares its class
            if getattr(model, "_is_replica", False):
                self._tell("in a replica (of DataParallel)")
            return False
        if self._thread is not None:  # inside of its own block, or of a probe
            if self._thread != threading.get_ident():
                self._tell("on a second thread while another thread runs the model")
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return False
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            self._tell("where saved tensors have no hooks (inside of torch.func)")
            return False
        return not getattr(_observed, "now", 0) and not _runs_inside_a_checkpoint()

    def _tell(self, where: str) -> None:
        if where not in self._told:
            self._told.add(where)
            warnings.warn(
                f"backfold: a call of the attached model runs {where}; it is not folded",
                stacklevel=5,
            )


def attach(model: torch.nn.Module, *, bits: float | Unset | None = UNSET, **options: Any) -> Fold:
    """Folds what each call of `model` saves for backward, with no change to the training loop.

    Every call with gradients enabled, in train() or in eval(), counts as a step: the same as a call
    inside ``with fold:``. What a loss outside of the call saves is not folded. The model's class,
    keys, copies and pickles stay as they are; copies are not attached.

    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU())
    >>> fold = attach(model, bits=4)
    >>> model(torch.randn(128, 256)).sum().backward()
    >>> fold.steps
    1
    >>> fold.detach()

    Args:
        model: a module. Where others wrap it (PEFT, DistributedDataParallel, torch.compile), attach
            the wrapper, or the module inside of it if that one is called, not its `forward`.
        bits: and all other options are those of `Controller`.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model must not be a ScriptModule, whose calls cannot be watched")
    _refuse_attached(model)
    fold = Fold(model, bits=bits, **options)
    fold.attach()
    return fold


def attached(model: torch.nn.Module) -> Fold | None:
    """The fold of a model that is attached, or of the module inside of it that is; else None."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = (fold_of(module) for module in model.modules())
    return next((fold for fold in found if fold is not None and fold.is_attached), None)


@contextmanager
def nothing_folded() -> Iterator[None]:
    """Calls of attached models in this block, on this thread, run as they are."""
    _observed.now = getattr(_observed, "now", 0) + 1
    try:
        yield
    finally:
        _observed.now -= 1


def _refuse_attached(model: torch.nn.Module) -> None:
    """Raises ValueError if the model, a part of it or a whole that it is part of is attached."""
    if any(one is model for one in _attached_models):
        raise ValueError(
            "model is attached already: call detach() on the fold that attach() returned first"
        )
    for path, module in model.named_modules():
        if module in _attached_models:
            raise ValueError(
                f"model has a part that is attached already, {path!r}: detach that one first, so "
                "that each tensor is folded by one plan"
            )
    for whole in _attached_models:
        for path, module in whole.named_modules():
            if module is model:
                raise ValueError(
                    f"model is a part, {path!r}, of a model that is attached already: what it "
                    "saves is folded there"
                )


def _runs_inside_a_checkpoint() -> bool:
    """Whether a checkpoint drops what is saved now, or makes it again in backward."""
    if torch._C._current_graph_task_id() != -1:
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
