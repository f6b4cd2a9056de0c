# SPDX-License-Identifier: Apache-2.0
"""Records one call of the model in the user's own step, and runs it again after backward."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

# Models that failed on a part of their batch: they are recorded whole from then on.
_only_whole: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class ModelCall:
    """The first call of a model inside a block with gradients enabled, to be run again.

    >>> model = torch.nn.Linear(4, 2)
    >>> with ModelCall.watch(model, fraction=0.25) as call:
    ...     loss = model(torch.randn(16, 4)).square().mean()
    >>> loss.backward()
    >>> call.ready, call.share
    (True, 0.25)
    >>> run = call.step()
    >>> with call.untouched():
    ...     run()

    Attributes:
        share: which part of the batch is run again; 1.0 is all of it.
    """

    def __init__(self, model: torch.nn.Module, fraction: float) -> None:
        # What DistributedDataParallel does around its module belongs to the user's step alone.
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._fraction = 1.0 if self._model in _only_whole else fraction
        self._handles: list[Any] = []
        self._forget(
            "no call of the model was seen inside the block, with gradients enabled and outside of "
            "torch.compile"
        )

    @staticmethod
    def watch(model: torch.nn.Module, fraction: float = 0.25) -> Recorder:
        """A context to open where the block begins and to close where it ends."""
        return Recorder(ModelCall(model, fraction))

    @property
    def ready(self) -> bool:
        """Whether the call was recorded and a gradient has arrived at what it returned."""
        return bool(self._gradients)

    @property
    def waits(self) -> bool:
        """Whether the call was recorded and its backward has not come yet."""
        return self._arguments is not None and not self._gradients

    @property
    def reason(self) -> str:
        """Why the call cannot be run again; empty where it can."""
        return "" if self.ready else self._obstacle

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Parameters that require a gradient, then `input_leaves`."""
        return [p for p in self._model.parameters() if p.requires_grad] + self.input_leaves

    @property
    def input_leaves(self) -> list[torch.Tensor]:
        """Copies of the arguments that require a gradient, as leaves of their own."""
        tensors = self._arguments.tensors if self._arguments else []
        return [tensor for tensor in tensors if tensor.requires_grad]

    @property
    def sliced_gradients(self) -> bool:
        """Whether what is sent back are rows of the gradients that arrived in the user's step.

        Error energies of the part are then `share` times those of the whole batch. Where only a
        mean over the batch is sent back, inside the model, they are 1 / `share` times instead.
        """
        return self.share < 1 and any(gradient.dim() > 0 for gradient in self._gradients.values())

    @property
    def gain(self) -> float:
        """Energy of the gradients of the leaves by that of what was sent back, of the last run."""
        leaves, sent = (float(energy) for energy in self._energies)
        return leaves / sent if sent > 0 else 0.0

    def step(self) -> Callable[[], None]:
        """A function that runs forward and backward, each time the same, inside untouched().

        Gradients of `leaves` are computed and dropped: `.grad` and hooks on its accumulation are
        not reached. Gradients that arrive from now on are not recorded.
        """
        if not self.ready:
            raise RuntimeError(f"the call of the model cannot be run again: {self.reason}")
        self._stop_listening()
        # A mean over part of the batch weighs each row 1 / share times as much.
        weight = self.share if self.sliced_gradients else 1.0
        gradients = {
            index: gradient if gradient.dim() > 0 else gradient * weight
            for index, gradient in self._gradients.items()
        }

        def run() -> None:
            outputs = self._forward(gradients)
            if len(outputs) > 1:
                # What arrived at an output includes what came through outputs computed from it.
                for output, gradient in zip(outputs, gradients.values(), strict=True):
                    output.register_hook(lambda _, arrived=gradient: arrived)
            with torch.enable_grad(), self._autocast.off():
                sent = tuple(gradients.values())
                found = torch.autograd.grad(outputs, self.leaves, sent, allow_unused=True)
            self._energies = _energy(found), _energy(sent)

        return run

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Afterwards buffers, generators, training flags and `.grad` are what they were."""
        state = _State(self._model, self._devices)
        gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        with state.same_versions():
            try:
                yield
            finally:
                state.restore()
                for parameter, gradient in gradients:
                    if parameter.grad is not gradient:
                        parameter.grad = gradient

    def _forward(self, gradients: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        self._state.restore()
        try:
            with torch.enable_grad(), self._autocast.on():
                args, kwargs = self._arguments.copies()
                found = _tensors(self._model(*args, **kwargs))
            for index, like in gradients.items():
                if index >= len(found) or found[index].shape != like.shape:
                    raise RuntimeError("the model returned other tensors when it was run again")
            return [found[index] for index in gradients]
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if self.share < 1:
                _only_whole.add(self._model)
            raise

    def _forget(self, obstacle: str) -> None:
        self._stop_listening()
        self._obstacle = obstacle
        self._arguments: _Arguments | None = None
        self._devices: set[torch.device] = set()
        self._kept_rows: int | None = None
        self._gradients: dict[int, torch.Tensor] = {}
        self.share = 1.0

    def _attempt(self, record: Callable[..., None], *given: Any) -> None:
        try:
            with torch.no_grad():
                record(*given)
        except Exception as error:  # a probe may fail, the user's step must not
            self._forget(f"the call of the model could not be recorded: {error}")

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = [*self._model.parameters(), *self._model.buffers(), *self._model.modules()]
        self._arguments = _Arguments(args, kwargs, own)
        tensors = [*self._arguments.tensors, *(value for value in own if _is_tensor(value))]
        self._devices = {tensor.device for tensor in tensors}
        self._state = _State(self._model, self._devices)
        self._autocast = _Autocast({"cpu", *(device.type for device in self._devices)})

    def _end(self, result: object) -> None:
        found = enumerate(_tensors(result))
        outputs = {index: tensor for index, tensor in found if tensor.grad_fn is not None}
        if not outputs:
            self._forget("the model raised, or returned no tensor with a gradient")
            return
        self._obstacle = "no gradient has arrived at what the model returned"
        self._slice([tensor for tensor in outputs.values() if tensor.dim() > 0])
        scalars_after = _scalars_after(outputs)
        for index, tensor in outputs.items():
            self._listen(index, tensor, scalars_after[index])

    def _slice(self, outputs: list[torch.Tensor]) -> None:
        batched = [tensor for tensor in self._arguments.tensors if tensor.dim() > 0]
        sizes = {tensor.size(0) for tensor in (*batched, *outputs)}
        if not batched or len(sizes) > 1 or any(t.layout != torch.strided for t in batched):
            return
        (rows,) = sizes
        kept = max(math.ceil(rows * self._fraction - 1e-9), 2)  # batch norm needs two
        if kept < rows:
            self._arguments = self._arguments.first(kept)
            self._kept_rows, self.share = kept, kept / rows

    def _listen(self, index: int, output: torch.Tensor, scalars_after: set[int]) -> None:
        this = weakref.ref(self)

        def arrived(gradient: torch.Tensor) -> None:
            call = this()
            # What a scalar output was computed from gets its gradient again from there.
            if call and call._arguments and not scalars_after & call._gradients.keys():
                call._attempt(call._add, index, gradient)

        self._handles.append(output.register_hook(arrived))

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        part = gradient.detach()[: self._kept_rows] if gradient.dim() > 0 else gradient.detach()
        earlier = self._gradients.get(index)
        self._gradients[index] = part.clone() if earlier is None else earlier + part

    def _stop_listening(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class Recorder:
    """Watches a model for the call that a ModelCall records."""

    def __init__(self, call: ModelCall) -> None:
        self.call = call
        self._handles: list[Any] = []
        self._depth = 0  # of calls that the model makes to itself
        self._records = False

    def __enter__(self) -> ModelCall:
        model = self.call._model
        if isinstance(model, torch.jit.ScriptModule):
            self.call._forget("the model is a ScriptModule, whose calls are not seen")
        else:
            before = model.register_forward_pre_hook(self._begins, prepend=True, with_kwargs=True)
            after = model.register_forward_hook(self._ends, always_call=True)
            self._handles = [before, after]
        return self.call

    def __exit__(self, *exception: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _begins(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1 and self.call._arguments is None and torch.is_grad_enabled():
            self.call._attempt(self.call._begin, args, kwargs)
            self._records = self.call._arguments is not None

    def _ends(self, model: torch.nn.Module, args: tuple[Any, ...], result: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._records:
            self._records = False
            self.call._attempt(self.call._end, result)


class _Arguments:
    """Arguments of a call, copied so that later changes in place do not matter.

    `shared` and modules elsewhere in the arguments are not copied.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], shared: list[Any]) -> None:
        self._shared = shared
        self._tree: tuple[tuple[Any, ...], dict[str, Any]] = args, kwargs
        self._tree = self._mapped(_as_leaf)

    @property
    def tensors(self) -> list[torch.Tensor]:
        shared = {id(value) for value in self._shared}
        return [tensor for tensor in _tensors(self._tree) if id(tensor) not in shared]

    def first(self, rows: int) -> _Arguments:
        """The same with the first rows of each tensor that has any."""
        part = copy.copy(self)
        part._tree = self._mapped(lambda t: _as_leaf(t, rows) if t.dim() > 0 else t)
        return part

    def copies(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """For one call, which may change them. Gradients go to the originals."""
        return self._mapped(torch.Tensor.clone)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        memo = {id(value): value for value in self._shared}
        for value in _values(self._tree):
            if id(value) in memo:
                continue
            if _is_tensor(value):
                memo[id(value)] = change(value)
            elif isinstance(value, (torch.nn.Module, types.MethodType)):
                memo[id(value)] = value
        return copy.deepcopy(self._tree, memo)


def _as_leaf(tensor: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    part = tensor.detach() if rows is None else tensor.detach()[:rows]
    return part.clone().requires_grad_(tensor.requires_grad)


class _State:
    """What a forward pass reads and may change beside its arguments, as it is now."""

    def __init__(self, model: torch.nn.Module, devices: set[torch.device]) -> None:
        self._modules = [
            (module, module.training, {} if _is_script(module) else dict(module._buffers))
            for module in model.modules()
        ]
        self._buffers = [
            (buffer, buffer.detach().clone()) for buffer in model.buffers() if _is_writable(buffer)
        ]
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
        for set_state, state in self._generators:
            set_state(state)

    def same_versions(self) -> AbstractContextManager[None]:
        """For a block at whose end buffers are restored.

        A graph of the user's may have saved a buffer that a run of the model writes in between.
        """
        buffers = tuple(buffer for buffer, _ in self._buffers)
        return torch.autograd.grad_mode._unsafe_preserve_version_counter(buffers)


class _Autocast:
    """The state of autocast, as it is now."""

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


def _energy(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for norm in torch._foreach_norm([t.detach() for t in tensors if t is not None]):
        norms.setdefault(norm.device, []).append(norm.float())
    return sum(torch.stack(of_device).cpu().double().square().sum() for of_device in norms.values())


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_script(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_writable(buffer: torch.Tensor) -> bool:
    """False where nobody can write in place, as where elements share memory."""
    if buffer.layout != torch.strided or buffer.is_inference():
        return False
    return all(
        stride > 0 or size < 2 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


def _tensors(tree: object) -> list[torch.Tensor]:
    return [value for value in _values(tree) if _is_tensor(value)]


def _values(tree: object) -> list[Any]:
    """What containers and plain objects hold, each once, in an order that the structure gives."""
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
    """What a container or plain object holds; None for other values."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, types.MethodType, type)):
        return None
    below = pytree.tree_leaves(value, is_leaf=lambda node: node is not value)
    if len(below) != 1 or below[0] is not value:
        return below
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):  # of a class of its own, as Mapping may be
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(vars(value).values()) if hasattr(value, "__dict__") else None


def _scalars_after(outputs: Mapping[int, torch.Tensor]) -> dict[int, set[int]]:
    """For each output, which scalar outputs were computed from it."""
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
