# SPDX-License-Identifier: Apache-2.0
"""The planner on tables measured by probes, against scipy's integer programs."""

import backfold
import numpy
import pytest
import torch
from backfold import _C
from scipy.optimize import Bounds, LinearConstraint, milp
from test_probe import Block, mixed
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = [1, 2, 3, 4, 5, 6, 8, 16]


def error_at(errors: dict[int, float], bits: int) -> float:
    """As in the controller: a power law between two measured widths, and beyond."""
    steps = {width: 2.0**width - 1 for width in (*errors, bits)}
    below = max((width for width in errors if width <= bits), default=min(errors))
    above = min((width for width in errors if width >= bits), default=max(errors))
    if below == above:
        return errors[below] * (steps[below] / steps[bits]) ** 2
    along = numpy.log(steps[bits] / steps[below]) / numpy.log(steps[above] / steps[below])
    return errors[below] * (errors[above] / errors[below]) ** along


def menus(model: nn.Module, step) -> list[list[tuple[int, float]]]:
    """Bytes and error of each packet of the model at every width."""
    fold = backfold.Controller(model, bits=2, min_bytes=0)
    fold.calibrate(step)
    sites = fold.state_dict()["sites"]
    elements = {site["name"]: site["elements"] for site in sites}
    found: dict[str, dict[int, float]] = {}
    for site in sites:
        errors = {int(b): e for b, e in site["sensitivity"]["errors"].items()}
        if errors and all(error > 0 for error in errors.values()):
            of_packet = found.setdefault(site["root"] or site["name"], dict.fromkeys(WIDTHS, 0.0))
            for bits in WIDTHS:
                of_packet[bits] += error_at(errors, bits)
    return [
        [(elements[name] * bits // 8, error) for bits, error in errors.items()]
        for name, errors in found.items()
        if elements[name] > 0
    ]


def optimum(sites: list[list[tuple[int, float]]], budget: int) -> float:
    options = [option for site in sites for option in site]
    costs = numpy.array([bytes_ for bytes_, _ in options], dtype=float)
    errors = numpy.array([error for _, error in options])
    owner = numpy.repeat(numpy.arange(len(sites)), [len(site) for site in sites])
    one_each = (owner[None, :] == numpy.arange(len(sites))[:, None]).astype(float)
    scale = errors.max()
    result = milp(
        errors / scale,
        integrality=numpy.ones(len(options)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(costs / budget, 0, 1)],
        options={"mip_rel_gap": 1e-4, "time_limit": 5},
    )
    assert result.success
    return result.fun * scale


def transformer(seed: int):
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block() for _ in range(1 + seed % 3)))
    x = torch.randn(8 * (1 + seed % 4), 12, 32)
    return model, lambda: model(x).square().mean().backward()


def convolutional(seed: int):
    model, x, y = mixed("cpu")
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1 + 0.05 * (seed % 5))
    return model, lambda: functional.cross_entropy(model(x), y).backward()


def test_plans_of_measured_tables_are_within_a_hundredth_of_the_optimum():
    ratios = []
    for seed in range(10):
        sites = menus(*(transformer if seed % 2 else convolutional)(seed))
        assert len(sites) >= 6
        least = sum(min(bytes_ for bytes_, _ in site) for site in sites)
        for width in (1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8):
            budget = int(least * width)
            choice, bytes_, error, bound = _C.make_plan(sites, budget)
            assert bytes_ <= budget
            assert bytes_ == sum(site[k][0] for site, k in zip(sites, choice, strict=True))
            best = optimum(sites, budget)
            assert bound <= best * (1 + 1e-3)
            ratios.append(error / best)
    assert len(ratios) == 100
    assert max(ratios) < 1.01
