# SPDX-License-Identifier: Apache-2.0
"""How far folded gradients are from the plain one in the first steps of training.

Each step starts from one state of weights, buffers and generators and runs three ways: plain (twice
in the first step: does the model repeat itself?), under `bits=None`, and folded. Then Adam applies
the plain gradient, so that the next step has different weights. The controllers persist: they
measure at step 2 and follow the plan from step 3 on.
"""

import contextlib
import dataclasses
import math
import random
import typing
import warnings
from collections.abc import Callable, Iterator

import backfold
import numpy
import torch
from torch import Tensor

LEARNING_RATE = 1e-3
MIN_BYTES = 0  # at these sizes the default would leave nearly all tensors unfolded

Gradient = list[Tensor | None]


class Task(typing.NamedTuple):
    """A freshly initialised model and one batch."""

    model: torch.nn.Module
    outputs: Callable[[], object]  # calls the model: any nesting of tensors and other values


class NotComparable(ValueError):
    """The plain gradient is zero or not finite."""


@dataclasses.dataclass
class Errors:
    """What `measure` found; numbers per step."""

    errors: list[float]  # ||folded - plain|| / ||plain||; infinite where something is not finite
    bitwise: bool  # whether bits=None gave plain's gradients, bit for bit, in every step
    repeats: bool  # whether plain gave the same ones twice
    parameters: int
    messages: list[str]  # Backfold's warnings, each once

    @property
    def worst(self) -> float:
        return max(self.errors)


def float_tensors(value: object) -> Iterator[Tensor]:
    """The tensors in a nested value that can carry a gradient, in order."""
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from float_tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from float_tensors(part)
    elif dataclasses.is_dataclass(value):
        yield from float_tensors(vars(value))


class RandomWeights:
    """The loss: all outputs, weighted by fixed random numbers. Linear, so it adds no rounding."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, torch.Size], Tensor] = {}

    def __call__(self, outputs: object) -> Tensor:
        found = list(float_tensors(outputs))
        if not found:
            raise ValueError("no output has a gradient")
        parts = [(x.float() * self._of(i, x.shape)).sum() for i, x in enumerate(found)]
        return torch.stack(parts).sum()

    def _of(self, index: int, shape: torch.Size) -> Tensor:
        if (index, shape) not in self._weights:
            generator = torch.Generator().manual_seed(index)
            weights = torch.randn(shape, generator=generator) / math.sqrt(shape.numel())
            self._weights[index, shape] = weights
        return self._weights[index, shape]


class State:
    """A snapshot of parameters, buffers and generators; `restore` brings it back."""

    def __init__(self, model: torch.nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._buffers = [(module, dict(module._buffers)) for module in model.modules()]
        self._generators = torch.get_rng_state(), numpy.random.get_state(), random.getstate()

    def restore(self) -> None:
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, copy in self._tensors:
                if not same(tensor, copy):
                    tensor.copy_(copy)
        of_torch, of_numpy, of_python = self._generators
        torch.set_rng_state(of_torch)
        numpy.random.set_state(of_numpy)
        random.setstate(of_python)


def gradient(
    task: Task,
    loss: Callable[[object], Tensor],
    scope: contextlib.AbstractContextManager[object] | None = None,
) -> Gradient:
    """Gradients of all parameters, None where there is none; forward runs inside `scope`."""
    parameters = list(task.model.parameters())
    for parameter in parameters:
        parameter.grad = None
    with scope or contextlib.nullcontext():
        value = loss(task.outputs())
    value.backward()
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Compares bit for bit: 0 is not -0, and a NaN equals itself."""
    if a is None or b is None:
        return a is b
    a, b = a.detach().to_dense().flatten(), b.detach().to_dense().flatten()
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def all_same(a: Gradient, b: Gradient) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def relative_error(found: Gradient, plain: Gradient) -> float:
    """The error over all parameters together."""
    error = energy = 0.0
    for a, b in zip(found, plain, strict=True):
        if a is None or b is None:
            if a is not b:
                return math.inf
            continue
        a, b = a.to_dense().double(), b.to_dense().double()
        error += float((a - b).square().sum())
        energy += float(b.square().sum())
    if not math.isfinite(energy) or energy == 0:
        raise NotComparable(f"the plain gradient has a squared norm of {energy}")
    return math.sqrt(error / energy) if math.isfinite(error) else math.inf


def measure(task: Task, bits: float | None = 4, steps: int = 4, **options: typing.Any) -> Errors:
    """Runs `steps` training steps; `options` go to the folding controller."""
    options = {"min_bytes": MIN_BYTES, **options}
    exact = backfold.Controller(task.model, bits=None, min_bytes=MIN_BYTES)
    fold = backfold.Controller(task.model, bits=bits, **options)
    optimizer = torch.optim.Adam(
        [p for p in task.model.parameters() if p.requires_grad], LEARNING_RATE
    )
    loss = RandomWeights()
    errors: list[float] = []
    bitwise = repeats = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            before = State(task.model)
            plain = gradient(task, loss)
            after = State(task.model)
            before.restore()
            if step == 0:
                repeats = all_same(plain, gradient(task, loss))
                before.restore()
            bitwise &= all_same(plain, gradient(task, loss, exact))
            before.restore()
            errors.append(relative_error(gradient(task, loss, fold), plain))
            after.restore()
            for parameter, part in zip(task.model.parameters(), plain, strict=True):
                parameter.grad = part
            optimizer.step()
    messages = [str(w.message) for w in caught if "backfold" in str(w.message).lower()]
    return Errors(
        errors=errors,
        bitwise=bitwise,
        repeats=repeats,
        parameters=sum(p.numel() for p in task.model.parameters()),
        messages=list(dict.fromkeys(messages)),
    )
