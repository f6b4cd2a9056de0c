# SPDX-License-Identifier: Apache-2.0
"""Records one call of the model in the user's own step, and runs it again after backward."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from backfold._call_state import (
    Arguments,
    Autocast,
    State,
    energy_of,
    energy_of_norms,
    has_node,
    is_tensor,
    scalars_after,
    tensors_in,
)
from backfold._module_state import Writes

# A measurement should not depend on fewer rows, if the batch has them.
_FEW = 4

# Models that failed on a part of their batch, and are recorded whole from then on.
_only_whole: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def records_whole(model: torch.nn.Module) -> bool:
    """Whether calls of a model are recorded with the whole batch, whatever `fraction` says."""
    return _own_module(model) in _only_whole


def record_whole(model: torch.nn.Module) -> None:
    _only_whole.add(_own_module(model))


def _own_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of DistributedDataParallel, which must only run in the user's step."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _normalises_batches(model: torch.nn.Module) -> bool:
    """Whether a single row could have no variance."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


class ModelCall:
    """The first call of a model inside a block with gradients enabled, recorded to be repeated.

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
        share: the part of the batch that is run again; 1.0 is all of it.
        left_changed: names of attributes that runs changed and untouched() could not restore.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fraction: float,
        at_most: float = 0.0,
        on_return: Callable[[list[tuple[torch.Tensor, int]]], None] | None = None,
    ) -> None:
        self._model = _own_module(model)
        self._fraction = 1.0 if records_whole(model) else fraction
        self._at_most = max(self._fraction, at_most)
        self._handles: list[Any] = []
        self._on_return = on_return
        self._forget(
            "no call of the model was seen inside the block with gradients enabled and outside of "
            "torch.compile"
        )

    @staticmethod
    def watch(
        model: torch.nn.Module,
        fraction: float = 0.25,
        at_most: float = 0.0,
        on_return: Callable[[list[tuple[torch.Tensor, int]]], None] | None = None,
    ) -> Recorder:
        """A context to enter where the block begins and to leave where it ends.

        `fraction` of the batch is run again, or four rows if these are no more than `at_most`.
        `on_return` is called with the outputs of the recorded call that have a gradient, each with
        the number of its rows that are run again, 0 for all.
        """
        return Recorder(ModelCall(model, fraction, at_most, on_return))

    @property
    def ready(self) -> bool:
        """Whether the call was recorded and a gradient has arrived at its outputs."""
        return bool(self._gradients)

    @property
    def waits(self) -> bool:
        """Whether the call was recorded and its backward has not run yet."""
        return self._arguments is not None and not self._gradients

    @property
    def reason(self) -> str:
        """Why the call cannot be run again; empty if it can."""
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
    def own_leaves(self) -> list[torch.Tensor]:
        """All leaves that receive a gradient only in runs of step()."""
        return [*self._own.values(), *self.input_leaves]

    @property
    def sliced_gradients(self) -> bool:
        """Whether backward starts from rows of the gradients that arrived in the user's step.

        Error energies of the part are then `share` times those of the whole batch. If the model
        itself returns a mean over the batch, they are 1 / `share` times those instead.
        """
        return self.share < 1 and any(gradient.dim() > 0 for gradient in self._gradients.values())

    @property
    def gain(self) -> float:
        """Energy of the leaves' gradients / energy sent back, in the last run."""
        leaves, sent = (float(energy) for energy in self._energies)
        return leaves / sent if sent > 0 else 0.0

    @property
    def gradient_energy(self) -> float:
        """Energy of the leaves' gradients in the last run."""
        return float(self._energies[0])

    @property
    def whole_energy(self) -> float | None:
        """That of the whole batch's gradient, in the user's own step; None if unknown."""
        return float(energy_of_norms(self._norms)) if self._norms else None

    @property
    def moved(self) -> list[torch.Tensor | None]:
        """Differences of the call's outputs between the last two runs; None if unknown.

        In the order of `on_return`.
        """
        before, after = self._returned
        return [
            (before[index] - after[index]) if index in before and index in after else None
            for index in self._outputs
        ]

    def step(self) -> Callable[[], None]:
        """A function that runs the same forward and backward each time, inside untouched().

        Gradients of `leaves` are computed and dropped, without touching `.grad` or hooks on its
        accumulation. Gradients that arrive from now on are not recorded.
        """
        self.prepare()

        def run() -> None:
            with self.unwritten():
                self.rewind()
                outputs = self.forward()
                returned = {i: one.detach() for i, one in zip(self._sent, outputs, strict=True)}
                self._returned = self._returned[1], returned
                found = self.backward(outputs)
            self._energies = energy_of(found), energy_of(self._sent.values())

        return run

    # The parts of a run, for callers that time them or put something around one.

    def prepare(self) -> None:
        """Ends the recording, so that runs can begin."""
        if not self.ready:
            raise RuntimeError(f"the call of the model cannot be run again: {self.reason}")
        self._stop_listening()
        # A mean over part of the batch weighs each row 1 / share times as much.
        weight = self.share if self.sliced_gradients else 1.0
        # Reentrant checkpoints run a backward of their own, which adds to `.grad` whatever the
        # outer one asks for. Other tensors with the same memory receive it, without hooks.
        self._own = {
            id(parameter): torch.nn.Parameter(parameter.detach())
            for parameter in self._model.parameters()
            if self._reentrant and parameter.requires_grad
        }
        self._sent = {
            index: gradient if gradient.dim() > 0 else gradient * weight
            for index, gradient in self._gradients.items()
        }

    @contextmanager
    def unwritten(self) -> Iterator[None]:
        """A block for one run, inside untouched(), after which what it wrote to is restored."""
        writes = Writes(self._state.tensors)
        try:
            with writes.undone(), self._with_own_parameters():
                yield
        finally:
            self.left_changed.update(dict.fromkeys(writes.unseen))

    def rewind(self) -> None:
        """Restores buffers, attributes and generators as they were before the recorded call."""
        self._state.restore()

    @contextmanager
    def _with_own_parameters(self) -> Iterator[None]:
        """Puts `_own` in the place of the model's parameters, if there are any."""
        replaced = []
        for module in self._model.modules() if self._own else ():
            for name, parameter in module._parameters.items():
                if id(parameter) in self._own:
                    replaced.append((module, name, parameter))
        try:
            for module, name, parameter in replaced:
                module._parameters[name] = self._own[id(parameter)]
            yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter
            for leaf in (*self._own.values(), *(self.input_leaves if self._own else ())):
                leaf.grad = None

    def forward(self, batch: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Calls the model, and returns the outputs at which gradients arrived.

        `batch`, if given, receives the arguments without a gradient: a program has them for longer
        than the call.
        """
        try:
            with torch.enable_grad(), self._autocast.on():
                args, kwargs = self._arguments.copies()
                if batch is not None:
                    given = tensors_in((args, kwargs))
                    batch += [tensor for tensor in given if not tensor.requires_grad]
                found = tensors_in(self._model(*args, **kwargs))
            for index, like in self._sent.items():
                if index >= len(found) or found[index].shape != like.shape:
                    raise RuntimeError("the model returned other tensors when run again")
            return [found[index] for index in self._sent]
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if self.share < 1:
                record_whole(self._model)
            raise

    def backward(self, outputs: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradients of `leaves`, from those that arrived at the outputs."""
        sent = tuple(self._sent.values())
        if len(outputs) > 1:
            # The gradient at an output already includes that of outputs computed from it.
            for output, gradient in zip(outputs, sent, strict=True):
                output.register_hook(lambda _, arrived=gradient: arrived)
        with torch.enable_grad(), self._autocast.off():
            if self._own:
                torch.autograd.backward(outputs, sent)
                return [leaf.grad for leaf in self.leaves]
            return torch.autograd.grad(outputs, self.leaves, sent, allow_unused=True)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A block after which the model, its `.grad` and the generators are restored.

        Inside, parameters that only the recorded call wrote to have their values from before it.
        """
        state = State(self._model, self._devices)
        gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        with state.same_versions(), self._writes.not_yet():
            try:
                yield
            finally:
                self.left_changed.update(dict.fromkeys(state.changed_for_good()))
                state.restore_members()
                state.restore()
                for parameter, gradient in gradients:
                    if parameter.grad is not gradient:
                        parameter.grad = gradient

    def _forget(self, obstacle: str) -> None:
        self._stop_listening()
        self._obstacle = obstacle
        self._arguments: Arguments | None = None
        self._devices: set[torch.device] = set()
        self._kept_rows: int | None = None
        self._gradients: dict[int, torch.Tensor] = {}
        self._sent: dict[int, torch.Tensor] = {}  # those that runs begin their backward with
        self.left_changed: dict[str, None] = {}
        self._outputs: list[int] = []  # indices of the outputs with a gradient
        self._task: int | None = None  # the backward that the gradients came from
        self._norms: list[torch.Tensor] = []  # of what parameters were given in it
        self._returned: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = ({}, {})
        self._reentrant = False  # it uses checkpoints that are
        self._own: dict[int, torch.nn.Parameter] = {}  # by the parameter's id
        self.share = 1.0

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records the arguments of a call that begins now."""
        self._attempt(self._begin, args, kwargs)

    def end(self, result: object) -> None:
        """Records what the call returned; None if it raised."""
        if self._arguments is not None:
            self._attempt(self._end, result)

    def _attempt(self, record: Callable[..., None], *given: Any) -> None:
        try:
            with torch.no_grad():
                record(*given)
        except Exception as error:  # a probe may fail, the user's step must not
            self._forget(f"the call of the model could not be recorded: {error}")

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = [*self._model.parameters(), *self._model.buffers(), *self._model.modules()]
        self._arguments = Arguments(args, kwargs, own)
        tensors = [*self._arguments.tensors, *(value for value in own if is_tensor(value))]
        self._devices = {tensor.device for tensor in tensors}
        self._state = State(self._model, self._devices)
        self._autocast = Autocast({"cpu", *(device.type for device in self._devices)})
        self._writes = Writes(self._state.tensors)
        self._writes.watch()

    def _end(self, result: object) -> None:
        self._writes.stop()
        if self._writes.unseen:
            self._forget(
                f"it writes to {', '.join(self._writes.unseen)} without using torch's operators"
            )
            return
        found = enumerate(tensors_in(result))
        outputs = {index: tensor for index, tensor in found if tensor.grad_fn is not None}
        if not outputs:
            self._forget("the model raised, or returned no tensor with a gradient")
            return
        self._obstacle = "no gradient has arrived at the model's outputs"
        self._reentrant = has_node(outputs.values(), "CheckpointFunctionBackward")
        self._slice([tensor for tensor in outputs.values() if tensor.dim() > 0])
        self._outputs = list(outputs)
        if self._on_return is not None:
            kept = self._kept_rows or 0
            self._on_return([(one, kept if one.dim() > 0 else 0) for one in outputs.values()])
        later = scalars_after(outputs)
        for index, tensor in outputs.items():
            self._listen(index, tensor, later[index])
        if self.share < 1:
            self._listen_to_parameters()

    def _slice(self, outputs: list[torch.Tensor]) -> None:
        batched = [tensor for tensor in self._arguments.tensors if tensor.dim() > 0]
        sizes = {tensor.size(0) for tensor in (*batched, *outputs)}
        if not batched or len(sizes) > 1 or any(t.layout != torch.strided for t in batched):
            return
        (rows,) = sizes
        wanted, most = (math.ceil(rows * f - 1e-9) for f in (self._fraction, self._at_most))
        kept = max(wanted, min(most, _FEW), 2 if _normalises_batches(self._model) else 1)
        if kept < rows:
            self._arguments = self._arguments.first(kept)
            self._kept_rows, self.share = kept, kept / rows

    def _listen(self, index: int, output: torch.Tensor, later: set[int]) -> None:
        this = weakref.ref(self)

        def arrived(gradient: torch.Tensor) -> None:
            call = this()
            # An output that a scalar output was computed from gets that gradient a second time.
            if call and call._arguments and not later & call._gradients.keys():
                call._task = torch._C._current_graph_task_id()
                call._attempt(call._add, index, gradient)

        self._handles.append(output.register_hook(arrived))

    def _listen_to_parameters(self) -> None:
        this = weakref.ref(self)

        def arrived(gradients: tuple[torch.Tensor | None, ...]) -> None:
            call = this()
            if call and call._task == torch._C._current_graph_task_id():
                dense = [g for g in gradients if g is not None and g.layout == torch.strided]
                call._attempt(lambda: call._norms.extend(torch._foreach_norm(dense)))

        # Hooks of the parameters themselves would displace those that C++ has there.
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.is_leaf and not self._reentrant:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                self._handles.append(node.register_prehook(arrived))

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
        self._depth = 0  # of recursive calls of the model
        self._records = False

    def __enter__(self) -> ModelCall:
        model = self.call._model
        if isinstance(model, torch.jit.ScriptModule):
            self.call._forget("the model is a ScriptModule, whose calls cannot be watched")
        else:
            before = model.register_forward_pre_hook(self._begins, prepend=True, with_kwargs=True)
            after = model.register_forward_hook(self._ends, always_call=True)
            self._handles = [before, after]
        return self.call

    def __exit__(self, *exception: object) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self._records:  # the block ends inside the call
            self._records = False
            self.call.end(None)

    def _begins(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1 and self.call._arguments is None and torch.is_grad_enabled():
            self.call.begin(args, kwargs)
            self._records = self.call._arguments is not None

    def _ends(self, model: torch.nn.Module, args: tuple[Any, ...], result: object) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._records:
            self._records = False
            self.call.end(result)
