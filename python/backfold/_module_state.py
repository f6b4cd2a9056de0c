# SPDX-License-Identifier: Apache-2.0
"""The state that modules hold beside parameters and buffers, kept to be restored later."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from backfold import _C

# Attributes that torch itself keeps in every module, including hooks.
_OF_TORCH = frozenset(vars(torch.nn.Module()))
# Longer containers (vocabularies, indices) are copied, but their elements are not visited.
_LONG = 1000
# Objects of other classes are restored if a module holds them, but not the objects they hold in
# turn: a module's reference to its trainer leads to everything, even to other threads' objects.
_DEPTH = 1
_VALUES = (str, bytes, bool, int, float, complex, type(None))
_OPAQUE = (
    *_VALUES,
    torch.nn.Module,
    torch.dtype,
    torch.device,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)


class Writes:
    """Watches writes to tensors, and keeps copies of those that are written.

    Attributes:
        unseen: names of tensors that were written in a way that could not be watched.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._names = list(tensors)
        self._originals = _C.Originals(list(tensors.values()))
        self.unseen: list[str] = []

    def watch(self) -> None:
        self._originals.watch()

    def stop(self) -> None:
        self._originals.stop()
        self.unseen = [self._names[index] for index in self._originals.unseen()]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """A watched block; at its end the tensors are restored."""
        self.watch()
        try:
            yield
        finally:
            self.stop()
            self._originals.restore()

    @contextmanager
    def not_yet(self) -> Iterator[None]:
        """A block in which tensors have their values from before watch().

        Tensors that changed again after stop() keep their current values.
        """
        self._originals.rewind()
        try:
            yield
        finally:
            self._originals.return_from_rewind()


class ModuleState:
    """Attributes of all modules of a model, and the contents of lists, dicts and so on in them.

    >>> model = torch.nn.Linear(2, 2)
    >>> model.calls, model.losses = 1, [0.5]
    >>> state = ModuleState(model)
    >>> model.calls += 1
    >>> model.losses.append(0.25)
    >>> state.restore()
    >>> model.calls, model.losses
    (1, [0.5])

    Attributes:
        tensors: those that are neither parameters nor buffers, by name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._members: list[tuple[Any, Any]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Callable[[Any], object], Any]] = []
        self._left: list[tuple[str, Any, dict[str, Any]]] = []
        self._seen: dict[int, Any] = {}
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for members in (module._parameters, module._modules):
                self._members.append((members, dict(members)))
            own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
            self._attributes.append((vars(module), own))
            for name, value in own.items():
                self._walk(f"{path}.{name}" if path else name, value, _DEPTH)

    def restore(self) -> None:
        for attributes, held in self._attributes:
            for name in attributes.keys() - held.keys() - _OF_TORCH:
                del attributes[name]
            attributes.update(held)
        for holder, held in self._contents:
            _put_back(holder, held)
        for set_state, state in self._generators:
            set_state(state)

    def restore_members(self) -> None:
        """Restores which parameters and modules there are."""
        for holder, held in self._members:
            _put_back(holder, held)

    def changed_for_good(self) -> list[str]:
        """Names of attributes that have changed since and are not restored."""
        return [
            f"{name} ({type(value).__name__})"
            for name, value, held in self._left
            if not _is_same(vars(value), held)
        ]

    def _walk(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _OPAQUE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                self.tensors[name] = value
            return
        if (generator := _generator(value)) is not None:
            self._generators.append(generator)
            return
        if (held := _held(value)) is not None:
            self._contents.append((value, held))
            self._walk_all(name, held, depth)
        elif isinstance(value, tuple):
            self._walk_all(name, value, depth)
        if not hasattr(value, "__dict__") or type(value).__module__.startswith("backfold"):
            return
        held = dict(vars(value))
        if depth == 0:
            self._left.append((name, value, held))
            return
        self._attributes.append((vars(value), held))
        for key, one in held.items():
            self._walk(f"{name}.{key}", one, depth - 1)

    def _walk_all(self, name: str, held: Any, depth: int) -> None:
        if len(held) <= _LONG:
            for key, one in held.items() if isinstance(held, dict) else enumerate(held):
                self._walk(f"{name}[{key!r}]", one, depth)


def _generator(value: Any) -> tuple[Callable[[Any], object], Any] | None:
    """The setter and the current state of a generator or an array; None for others."""
    if isinstance(value, torch.Generator):
        return value.set_state, value.get_state()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.setstate, value.getstate()
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(value, numpy.random.RandomState):
        return value.set_state, value.get_state()
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return (lambda state: setattr(bits, "state", state)), bits.state
    if isinstance(value, numpy.ndarray) and value.flags.writeable:
        return (lambda elements: numpy.copyto(value, elements)), value.copy()
    return None


def _held(value: Any) -> Any:
    """A copy of a mutable container; None for others."""
    for kind in (list, deque, set, dict):
        if isinstance(value, kind):
            return kind(value)
    return None


def _put_back(holder: Any, held: Any) -> None:
    if _is_same(holder, held):
        return
    holder.clear()
    if isinstance(held, (dict, set)):
        holder.update(held)
    else:
        holder.extend(held)


def _is_same(now: Any, held: Any) -> bool:
    if len(now) != len(held):
        return False
    if isinstance(held, set):
        return {id(one) for one in now} == {id(one) for one in held}
    if isinstance(held, dict):
        return _are_same(now, held) and _are_same(now.values(), held.values())
    return _are_same(now, held)


def _are_same(now: Iterable[Any], held: Iterable[Any]) -> bool:
    """Whether the elements are pairwise the same object or equal values."""
    return all(
        a is b or (isinstance(a, _VALUES) and type(a) is type(b) and a == b)
        for a, b in zip(now, held, strict=True)
    )
