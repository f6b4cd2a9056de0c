# SPDX-License-Identifier: Apache-2.0
"""Checks folded gradients: error, bias and variance compared with plain ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from backfold._call_state import undone

if TYPE_CHECKING:
    from backfold._controller import Controller


@dataclasses.dataclass
class CheckRow:
    """One module. `error` and `bias` are relative to the norm of its plain gradient."""

    module: str
    gradient_norm: float
    error: float  # of one folded gradient, root mean square over repeats
    bias: float  # of the mean folded gradient, beyond what the variance explains
    bias_sigmas: float  # the bias in standard deviations of chance


@dataclasses.dataclass
class CheckResult:
    """One row per module with parameters, and a last row for all of them together."""

    rows: list[CheckRow]
    repeats: int

    def __str__(self) -> str:
        lines = [f"{'module':40} {'|gradient|':>11} {'error':>9} {'bias':>9} {'sigmas':>7}"]
        for row in self.rows:
            module = row.module if len(row.module) <= 40 else "~" + row.module[-39:]
            lines.append(
                f"{module:40} {row.gradient_norm:11.3e} {row.error:9.5f} {row.bias:9.5f} "
                f"{row.bias_sigmas:7.1f}"
            )
        lines.append(
            f"errors and biases are relative to the plain gradient, over {self.repeats} repeats; "
            "a bias within 3 sigmas may be chance"
        )
        return "\n".join(lines)


@contextmanager
def _own_gradients(parameters: list[torch.Tensor]) -> Iterator[None]:
    """Restores gradients after the block."""
    gradients = [parameter.grad for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def check_gradients(
    fold: Controller,
    model: torch.nn.Module | None,
    step: Callable[[], torch.Tensor],
    repeats: int,
) -> CheckResult:
    if model is None:
        raise ValueError("check needs the model: pass it to the Controller")
    if not callable(step):
        raise TypeError(f"step must be callable, got {type(step).__name__}")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 2:
        raise ValueError(f"repeats must be an int of 2 or more, got {repeats!r}")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("check needs a model with parameters that require gradients")
    parameters = [parameter for _, parameter in named]

    def gradients(folded: bool) -> list[torch.Tensor]:
        with undone(model):  # all runs see the same model and draw the same random numbers
            for parameter in parameters:
                parameter.grad = None
            if folded:
                with fold:
                    loss = step()
            else:
                loss = step()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError("step must return the loss, a tensor of one element")
            loss.backward()
        zero = torch.zeros((), device=parameters[0].device)
        return [zero.expand_as(p) if p.grad is None else p.grad.double() for p in parameters]

    with _own_gradients(parameters):
        plain = gradients(folded=False)
        mean = [torch.zeros_like(gradient) for gradient in plain]
        squares = [0.0] * len(plain)  # summed squared errors
        for _ in range(repeats):
            for i, folded in enumerate(gradients(folded=True)):
                error = folded - plain[i]
                mean[i] += error / repeats
                squares[i] += float(error.square().sum())

    totals: dict[str, list[float]] = {}
    for i, (name, _) in enumerate(named):
        module = name.rpartition(".")[0] or "(model)"
        values = (
            float(plain[i].square().sum()),
            squares[i] / repeats,
            float(mean[i].square().sum()),
        )
        for key in (module, "all"):
            row = totals.setdefault(key, [0.0, 0.0, 0.0])
            for k, value in enumerate(values):
                row[k] += value
    rows = [_row(module, *totals[module], repeats) for module in totals if module != "all"]
    rows.append(_row("all", *totals["all"], repeats))
    return CheckResult(rows, repeats)


def _row(module: str, norm: float, error: float, mean_error: float, repeats: int) -> CheckRow:
    # The mean of n unbiased errors has the energy error / n; anything beyond that is bias.
    variance = max(error - mean_error, 0.0) * repeats / (repeats - 1)
    bias = max(mean_error - variance / repeats, 0.0)
    scale = norm if norm > 0 else 1.0
    # The energy of the mean scatters by about its own expectation over the square root of the
    # number of independent errors, which is unknown; one per module is the cautious choice.
    chance = variance / repeats
    sigmas = math.sqrt(bias / chance) if chance > 0 else 0.0
    return CheckRow(
        module, math.sqrt(norm), math.sqrt(error / scale), math.sqrt(bias / scale), sigmas
    )
