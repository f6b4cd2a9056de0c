# SPDX-License-Identifier: Apache-2.0
"""The class of an attached model: its own class, with calls that go through a fold.

The model stays the same object with the same attributes, hooks and keys. Copies and pickles of it
have the class it had before, so that neither an EMA copy nor a file knows about Backfold.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

# How a model is called. Those who hold a model call `__call__`; a wrapper that torch.compile made
# earlier holds on to what `__call__` was then, and gets to `_call_impl`.
CALLS = ("__call__", "_call_impl")


class OpensBlocks(Protocol):
    """Decides which calls of the model are folded."""

    def open_for_call(self, model: torch.nn.Module) -> bool:
        """Opens a block for a call that begins now; False if the call is to run as it is."""

    def __exit__(self, *exception: object) -> None: ...


class Attached:
    """The first base of the class that an attached model has."""

    backfold_fold: OpensBlocks
    backfold_class: type  # the one it had before

    def __init_subclass__(cls, **_: Any) -> None:
        """Keeps the model's own class from noticing: it has gained no subclass of its user's."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = type(self)
        if "backfold_class" not in vars(own):  # others have built on it (parametrizations)
            made = memo[id(self)] = own.__new__(own)
            made.__dict__.update(copy.deepcopy(self.__dict__, memo))
            return made
        self.__class__ = self.backfold_class  # some classes copy with type(self)
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = own

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        if not isinstance(made, tuple) or "backfold_class" not in vars(type(self)):
            return made
        function, args, *rest = made
        if function is copyreg.__newobj__:  # pickle refuses it for another class than the object's
            function = self.backfold_class.__new__
        own = {type(self): self.backfold_class}
        swapped = tuple(own.get(one, one) if isinstance(one, type) else one for one in args)
        return (own.get(function, function), swapped, *rest)


def attach_class(model: torch.nn.Module, fold: OpensBlocks, names: Iterable[str] = CALLS) -> None:
    """Makes calls of the methods with these names go through the fold."""
    before = type(model)
    members = {name: _through_fold(getattr(before, name), before.forward) for name in names}
    # Looks like the class it stands for, also to those who write its name into a file.
    described = {name: getattr(before, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {**described, **members, "backfold_fold": fold, "backfold_class": before}
    bases = (before,) if issubclass(before, Attached) else (Attached, before)
    model.__class__ = types.new_class(
        before.__name__, bases, exec_body=lambda namespace: namespace.update(own)
    )


def detach_class(model: torch.nn.Module) -> None:
    """Gives the model its class back, unless others (fully_shard) have built on the one it has."""
    if "backfold_class" in vars(type(model)):
        model.__class__ = type(model).backfold_class


def fold_of(model: torch.nn.Module) -> OpensBlocks | None:
    """The fold of an attached model; it may have been detached since."""
    return type(model).backfold_fold if isinstance(model, Attached) else None


def _through_fold(method: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """A method that opens the fold's block, runs `method` inside of it and closes it.

    Dynamo steps over the method itself and over what opens and closes the block, which may run the
    model again to measure it, and compiles what runs inside.
    """
    from torch._dynamo.decorators import skip  # every torch.optim.Optimizer imports it as well

    # Dynamo begins with no frame of torch.nn: it gets one to begin with.
    is_torchs = str(getattr(forward, "__module__", "")).startswith("torch.")
    inner = _outside_of_torch(method) if is_torchs else method

    @torch.compiler.disable
    def opens(fold: OpensBlocks, model: torch.nn.Module) -> bool:
        return fold.open_for_call(model)

    @torch.compiler.disable
    def closes(fold: OpensBlocks, *exception: object) -> None:
        fold.__exit__(*exception)

    @skip
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        fold = self.backfold_fold
        if not opens(fold, self):
            return inner(self, *args, **kwargs)
        try:
            result = inner(self, *args, **kwargs)
        except BaseException:
            closes(fold, *sys.exc_info())
            raise
        closes(fold, None, None, None)
        return result

    call._torchdynamo_disable_msg = (
        "backfold opens its block here; for fullgraph=True, compile the model first and attach "
        "what torch.compile returns"
    )
    return call


def _outside_of_torch(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return run
