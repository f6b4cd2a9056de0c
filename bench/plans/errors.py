# SPDX-License-Identifier: Apache-2.0
"""The true error of folding: how far folded gradients are from the plain one, on average.

Errors count as they do in plans (src/torch/probe/leaf_weights.h): in relation to the gradient of
the parameter at which they arrive.
"""

import contextlib
import math
import operator
import statistics
import typing

import torch
from cases import Case
from torch import Tensor

LEAST_DRAWS, MOST_DRAWS = 16, 96
CLOSE = 0.03  # relative standard error of the mean at which drawing stops

Gradient = list[Tensor]


def gradient(case: Case, scope: contextlib.AbstractContextManager) -> Gradient:
    """The gradients of all parameters that have one, with the forward pass inside `scope`."""
    parameters = [parameter for parameter in case.model.parameters() if parameter.requires_grad]
    with scope:
        loss = case.loss()
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [part for part in found if part is not None]


def energy(parts: Gradient) -> float:
    return math.fsum(part.norm().item() ** 2 for part in parts)


def weights(plain: Gradient) -> list[float]:
    """How much a squared error counts at each parameter. The gradient's energy stays what it is."""
    energies = [part.norm().item() ** 2 for part in plain]
    counts = [part.numel() for part in plain]
    shares = [one / count for one, count in zip(energies, counts, strict=True) if one > 0]
    middle = statistics.median_high(shares)
    found = [1 / (one + count * middle) for one, count in zip(energies, counts, strict=True)]
    scale = math.fsum(energies) / math.fsum(map(operator.mul, energies, found))
    return [scale * weight for weight in found]


class Error(typing.NamedTuple):
    energy: float  # mean squared distance from the plain gradient, weighted, over draws
    uncertainty: float  # its relative standard error
    draws: int


def distance(case: Case, scope: contextlib.AbstractContextManager, plain: Gradient) -> float:
    """The weighted energy of one draw."""
    folded = gradient(case, scope)
    return math.fsum(
        weight * torch.dist(a, b).item() ** 2
        for weight, a, b in zip(weights(plain), folded, plain, strict=True)
    )


def true_error(case: Case, scope: contextlib.AbstractContextManager, plain: Gradient) -> Error:
    """Draws until the mean is accurate enough. Each entry of `scope` must round afresh."""
    draws: list[float] = []
    uncertainty = math.inf
    while len(draws) < LEAST_DRAWS or (uncertainty > CLOSE and len(draws) < MOST_DRAWS):
        draws.append(distance(case, scope, plain))
        if len(draws) > 1:
            mean = statistics.fmean(draws)
            uncertainty = statistics.stdev(draws) / (mean or 1) / math.sqrt(len(draws))
    return Error(statistics.fmean(draws), uncertainty, len(draws))
