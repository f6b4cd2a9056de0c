# SPDX-License-Identifier: Apache-2.0
"""Budgets that rounding alone does not keep, in several processes: what leaves is agreed."""

import contextlib
import warnings

import backfold
import pytest
import torch
from processes import returned, run
from test_offload import perceptron, settled
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


class Keeps(nn.Module):
    """The program of rank 1 also holds what some layers save, so that it cannot leave there."""

    def __init__(self, body: nn.Sequential) -> None:
        super().__init__()
        self.body = body
        self.kept: list[torch.Tensor] = []

    def forward(self, x):
        self.kept = []
        for layer in self.body:
            if isinstance(layer, nn.GELU) and distributed.get_rank() == 1 and len(self.kept) < 2:
                self.kept.append(x)
            x = layer(x)
        return x


def train(rank, model, x, steps, folds=True, rows=None, **options):
    """Of every step: the gradients, the plan, and the report once copies have ended."""
    warnings.filterwarnings("ignore", message=".*is kept by offloading")
    whole = DistributedDataParallel(model)
    fold = backfold.Controller(whole, **options) if folds else None
    gradients, plans, reports = [], [], []
    for step in range(steps):
        whole.zero_grad(set_to_none=True)
        shape = (rows[rank] if rows else len(x), x.shape[1])
        batch = torch.randn(shape, generator=torch.Generator().manual_seed(10 * rank + step))
        with fold or contextlib.nullcontext():
            loss = whole(batch).square().mean()
        if fold is not None:
            reports.append(settled(fold))
        loss.backward()
        gradients.append([p.grad.clone() for p in whole.parameters()])
        if fold is not None:
            plans.append(fold.plan())
    return gradients, plans, reports


def fewest_bits() -> int:
    """What one process holds at one bit everywhere."""
    model, x = perceptron()
    fold = backfold.Controller(model, bits=1, adaptive=False)
    with fold:
        model(x).square().mean()
    return fold.report().to_dict()["held_bytes"]


def planned(rank, options, steps, rows):
    model, x = perceptron()
    return train(rank, model, x, steps, probe_steps=(2,), rows=rows, **options)


@pytest.mark.parametrize("derive", [True, False])
def test_a_budget_below_what_the_fewest_bits_take_is_kept_by_all(derive):
    budget = int(0.6 * fewest_bits())
    results = returned(run(planned, 2, {"budget": budget, "derive": derive}, 5, None))
    (gradients, plans, reports), (others, other_plans, _) = results
    # The third step is the first with the plan that all have made together.
    assert plans[2:] == other_plans[2:] and plans[2]["offloaded"]
    assert plans[2]["sites"]
    for _, _, reports in results:
        assert reports[-1]["offloaded_bytes"] > 0
        assert reports[-1]["plan"]["sent_bytes"] == results[0][2][-1]["plan"]["sent_bytes"] > 0
        assert all(report["held_bytes"] <= budget for report in reports[1:])
    for mine, theirs in zip(gradients, others, strict=True):
        assert all(map(torch.equal, mine, theirs))  # DDP has reduced them


def test_the_process_with_the_largest_batch_keeps_its_budget_and_so_do_others():
    budget = int(0.9 * fewest_bits())  # for 256 rows
    results = returned(run(planned, 2, {"budget": budget}, 5, (288, 384)))
    plans = [plans[2:] for _, plans, _ in results]
    assert plans[0] == plans[1] and plans[0][-1]["offloaded"]
    for _, _, reports in results:
        assert reports[-1]["held_bytes"] <= budget


def keeping(rank, budget, steps):
    model, x = perceptron()
    plain, _, _ = train(rank, Keeps(perceptron()[0]), x, steps, folds=False)
    found, plans, reports = train(rank, Keeps(model), x, steps, budget=budget, bits=None)
    same = [all(map(torch.equal, *one)) for one in zip(found, plain, strict=True)]
    return same, plans, reports


def test_exact_tensors_that_stay_in_one_process_are_learned_to_stay_in_all():
    model, x = perceptron()
    fold = backfold.Controller(model, bits=None)
    with fold:
        model(x).square().mean()
    whole = fold.report().to_dict()["held_bytes"]
    results = returned(run(keeping, 2, int(0.6 * whole), 14))
    (same, plans, reports), (others, other_plans, other_reports) = results
    assert all(same) and all(others)
    assert plans == other_plans
    assert plans[1]["offloaded"] and plans[-1] != plans[1]
    assert other_reports[3]["held_bytes"] > 0.6 * whole  # what was to leave is held
    assert max(reports[-1]["held_bytes"], other_reports[-1]["held_bytes"]) <= 0.6 * whole


def told(rank, budget):
    model, x = perceptron()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        whole = DistributedDataParallel(model)
        fold = backfold.Controller(whole, budget=budget, probe_steps=(2,))
        for _ in range(4):
            with fold:
                loss = whole(x).square().mean()
            loss.backward()
    return [str(one.message) for one in seen if "is kept by offloading" in str(one.message)]


def test_the_first_process_alone_says_what_keeps_the_budget():
    first, second = returned(run(told, 2, int(0.6 * fewest_bits())))
    assert len(first) == 1 and second == []
