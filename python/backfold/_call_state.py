# SPDX-License-Identifier: Apache-2.0
"""Copies of what one call of a model takes, reads and changes, so that it can be repeated."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backfold._module_state import ModuleState, Writes


class Arguments:
    """Arguments of a call, copied so that later in-place changes do not matter.

    The objects in `shared`, and modules anywhere in the arguments, are not copied.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], shared: list[Any]) -> None:
        self._shared = shared
        self._tree: tuple[tuple[Any, ...], dict[str, Any]] = args, kwargs
        self._tree = self._mapped(_as_leaf)

    @property
    def tensors(self) -> list[torch.Tensor]:
        shared = {id(value) for value in self._shared}
        return [tensor for tensor in tensors_in(self._tree) if id(tensor) not in shared]

    def first(self, rows: int) -> Arguments:
        """The same with the first rows of each tensor that has any."""
        part = copy.copy(self)
        part._tree = self._mapped(lambda t: _as_leaf(t, rows) if t.dim() > 0 else t)
        return part

    def copies(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies for one call, which may change them. Gradients go to the originals."""
        return self._mapped(torch.Tensor.clone)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        memo = {id(value): value for value in self._shared}
        for value in _values(self._tree):
            if id(value) in memo:
                continue
            if is_tensor(value):
                memo[id(value)] = change(value)
            elif isinstance(value, (torch.nn.Module, types.MethodType)):
                memo[id(value)] = value
        return copy.deepcopy(self._tree, memo)


def _as_leaf(tensor: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    part = tensor.detach() if rows is None else tensor.detach()[:rows]
    return part.clone().requires_grad_(tensor.requires_grad)


class State:
    """The current state of what a forward pass reads and may change, apart from its arguments.

    Attributes:
        tensors: parameters, and tensors that modules hold beside parameters and buffers, by name.
            They are not copied here; `Writes` restores them.
    """

    def __init__(self, model: torch.nn.Module, devices: set[torch.device]) -> None:
        self._modules = [
            (module, module.training, {} if _is_script(module) else dict(module._buffers))
            for module in model.modules()
        ]
        self._buffers = [
            (buffer, buffer.detach().clone()) for buffer in model.buffers() if _is_writable(buffer)
        ]
        self._attributes = ModuleState(model)
        self.tensors = {**dict(model.named_parameters()), **self._attributes.tensors}
        self._generators: list[tuple[Callable[[Any], object], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
        ]
        if (numpy := sys.modules.get("numpy")) is not None:
            self._generators.append((numpy.random.set_state, numpy.random.get_state()))
        for device in devices:
            if device.type == "cuda":
                set_state = functools.partial(torch.cuda.set_rng_state, device=device)
                self._generators.append((set_state, torch.cuda.get_rng_state(device)))

    def restore(self) -> None:
        for module, training, buffers in self._modules:
            if module.training != training:
                module.training = training
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
        if self._buffers:
            buffers, values = zip(*self._buffers, strict=True)
            torch._foreach_copy_([buffer.data for buffer in buffers], values)
        self._attributes.restore()
        for set_state, state in self._generators:
            set_state(state)

    def restore_members(self) -> None:
        """Restores which parameters and modules there are."""
        self._attributes.restore_members()

    def changed_for_good(self) -> list[str]:
        """Names of attributes that have changed since and are not restored."""
        return self._attributes.changed_for_good()

    def same_versions(self) -> AbstractContextManager[None]:
        """Preserves version counters over a block that leaves buffers and `tensors` unchanged.

        The user's graph may have saved one of them that a run of the model writes in between.
        """
        tensors = [*(buffer for buffer, _ in self._buffers), *self.tensors.values()]
        return torch.autograd.grad_mode._unsafe_preserve_version_counter(
            tuple(tensor for tensor in tensors if not tensor.is_inference())
        )


@contextmanager
def undone(model: torch.nn.Module) -> Iterator[None]:
    """A block after which the model, except for gradients, and the generators are restored."""
    state = State(model, {tensor.device for tensor in (*model.parameters(), *model.buffers())})
    with state.same_versions(), Writes(state.tensors).undone():
        try:
            yield
        finally:
            state.restore_members()
            state.restore()


class Autocast:
    """The current state of autocast."""

    def __init__(self, device_types: set[str]) -> None:
        self._types = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(device_types)
            if torch.amp.is_autocast_available(kind)
        }
        self._remembers = torch.is_autocast_cache_enabled()

    @contextmanager
    def on(self) -> Iterator[None]:
        torch.clear_autocast_cache()  # parameters may have moved since they were cast
        try:
            with ExitStack() as stack:
                for kind, (enabled, dtype) in self._types.items():
                    state = torch.autocast(kind, dtype, enabled, self._remembers)
                    stack.enter_context(state)
                yield
        finally:
            torch.clear_autocast_cache()

    @contextmanager
    def off(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind in self._types:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield


def energy_of(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    return energy_of_norms(torch._foreach_norm([t.detach() for t in tensors if t is not None]))


def energy_of_norms(found: Iterable[torch.Tensor]) -> torch.Tensor:
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for norm in found:
        norms.setdefault(norm.device, []).append(norm.float())
    return sum(torch.stack(of_device).cpu().double().square().sum() for of_device in norms.values())


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_script(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_writable(buffer: torch.Tensor) -> bool:
    """False if it cannot be written in place, for example because elements share memory."""
    if buffer.layout != torch.strided or buffer.is_inference():
        return False
    return all(
        stride > 0 or size < 2 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


def tensors_in(tree: object) -> list[torch.Tensor]:
    return [value for value in _values(tree) if is_tensor(value)]


def _values(tree: object) -> list[Any]:
    """The values in containers and plain objects, each once, in the order of the structure."""
    found, seen, stack = [], {}, [tree]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        below = _held_by(value)
        if below is None:
            found.append(value)
        else:
            stack.extend(reversed(below))
    return found


def _held_by(value: Any) -> list[Any] | None:
    """The values that a container or plain object holds directly; None for other values."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, types.MethodType, type)):
        return None
    below = pytree.tree_leaves(value, is_leaf=lambda node: node is not value)
    if len(below) != 1 or below[0] is not value:
        return below
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):  # a subclass unknown to pytree, as Mapping may be
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(vars(value).values()) if hasattr(value, "__dict__") else None


def scalars_after(outputs: Mapping[int, torch.Tensor]) -> dict[int, set[int]]:
    """For each output, the scalar outputs that were computed from it."""
    after: dict[int, set[int]] = {index: set() for index in outputs}
    sources = {(t.grad_fn, t.output_nr): index for index, t in outputs.items() if t.dim() > 0}
    for index, tensor in outputs.items():
        if tensor.dim() == 0:
            for source in _computed_from(tensor.grad_fn, sources):
                after[source].add(index)
    return after


def _computed_from(node: Any, sources: Mapping[tuple[Any, int], int]) -> set[int]:
    found: set[int] = set()
    seen, stack = {node}, [node]
    while stack and len(found) < len(sources):
        for edge in stack.pop().next_functions:
            if edge in sources:
                found.add(sources[edge])
            if edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                stack.append(edge[0])
    return found


def has_node(outputs: Iterable[torch.Tensor], name: str) -> bool:
    """Whether a node of that name is in the graph that the outputs were computed by."""
    stack = [tensor.grad_fn for tensor in outputs]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node.name() == name:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return False
