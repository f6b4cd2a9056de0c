# SPDX-License-Identifier: Apache-2.0
"""Budgets that rounding alone does not keep, in several processes: products that all run again."""

import warnings

import backfold
import pytest
import torch
from processes import returned, run
from test_ddp import batch, built, network
from test_ddp_exact import Slow
from test_ddp_offload import train
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

PROBES = (2, 6)
WIDTH, ROWS, LAYERS = 128, 512, 12


class Deep(nn.Module):
    """Other products take long in each process."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.slow = Slow(self.layers[:2] if rank == 0 else self.layers[-2:])

    def forward(self, x):
        with self.slow:
            for layer in self.layers:
                x = functional.gelu(layer(x))
        return x


def with_one_bit(rows: int = ROWS) -> dict:
    fold = backfold.Controller(model := Deep(), bits=1, adaptive=False)
    with fold:
        model(torch.randn(rows, WIDTH)).square().mean()
    return fold.report().to_dict()


def planned(rank, options, steps=9, rows=None):
    options = {"probe_steps": PROBES, "rows": rows, "offload": False, **options}
    return train(rank, Deep(rank), torch.empty(ROWS, WIDTH), steps, **options)


@pytest.mark.parametrize("target", ["budget", "ratio"])
def test_a_target_below_what_the_fewest_bits_take_is_kept_by_all(target):
    least = with_one_bit()
    budget = int(0.8 * least["held_bytes"])
    ratio = least["unique_bytes"] / budget
    results = returned(run(planned, 2, {target: budget if target == "budget" else ratio}))
    (gradients, plans, _), (others, other_plans, _) = results
    # The second step is the first for which products are marked, the third has the first plan.
    assert plans[1:] == other_plans[1:]
    assert plans[1]["remade"] and not plans[1]["sites"]
    assert plans[2]["remade"] and plans[-1]["remade"] and plans[-1]["sites"]
    for _, _, reports in results:
        assert all(report["held_bytes"] <= budget for report in reports[2:])
        assert reports[-1]["remade"] == results[0][2][-1]["remade"]
        assert reports[-1]["remade"]["ms"] > 0
    for mine, theirs in zip(gradients, others, strict=True):
        assert all(map(torch.equal, mine, theirs))  # DDP has reduced them


def test_gradients_are_those_of_plain_training_up_to_the_noise_of_rounding():
    options = {"budget": int(0.8 * with_one_bit()["held_bytes"])}
    (found, plans, _), _ = returned(run(planned, 2, options))
    (expected, _, _), _ = returned(run(planned, 2, {"folds": False}))
    assert plans[-1]["remade"]
    for mine, plain in zip(found[3:], expected[3:], strict=True):
        error = sum((a - b).square().sum() for a, b in zip(mine, plain, strict=True))
        assert 0 < error < 0.05 * sum(b.square().sum() for b in plain)


def test_the_process_with_the_largest_batch_keeps_its_budget_and_so_do_others():
    rows = (ROWS * 3 // 4, ROWS)
    budget = int(0.8 * with_one_bit()["held_bytes"])
    results = returned(run(planned, 2, {"budget": budget}, 9, rows))
    (_, plans, _), (_, other_plans, _) = results
    assert plans[1]["remade"] == other_plans[1]["remade"]  # at widths of their own until planned
    assert plans[2:] == other_plans[2:] and plans[-1]["remade"]
    for _, _, reports in results:
        assert reports[-1]["held_bytes"] <= budget


def resumed(rank, stop, budget):
    warnings.filterwarnings("ignore", message=".*would drown the gradient")

    def one():
        whole = DistributedDataParallel(Deep(rank))
        return whole, backfold.Controller(whole, budget=budget, probe_steps=PROBES, offload=False)

    def steps(whole, fold, first, last):
        plans = []
        for step in range(first, last + 1):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
            with fold:
                loss = whole(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in whole.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            plans.append(fold.plan())
        return plans

    whole, fold = one()
    steps(whole, fold, 1, stop)
    state = fold.state_dict()
    again, other = one()
    again.load_state_dict(whole.state_dict())
    other.load_state_dict(state)
    rest = steps(whole, fold, stop + 1, 9), steps(again, other, stop + 1, 9)
    return *rest, list(whole.parameters()), list(again.parameters())


@pytest.mark.parametrize("stop", [1, 2, 4, 7])
def test_a_resumed_run_is_bitwise_the_same(stop):
    budget = int(0.8 * with_one_bit()["held_bytes"])
    for plans, other_plans, found, others in returned(run(resumed, 2, stop, budget)):
        assert plans == other_plans and plans[-1]["remade"]
        assert all(map(torch.equal, found, others))


def short_of_memory(rank, least):
    """Memory suffices for no more than `least` rows in the second process."""
    model = network()
    parallel, fold = built("DDP", model, bits=4, probe_steps=PROBES)
    rows = []

    def fail(_, args):
        if len(args[0]) < 16 and rank == 1 and len(args[0]) > least:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        rows.append(len(args[0]))

    model.register_forward_pre_hook(fail)
    for step in range(8):
        x, y = batch(rank, step)
        with fold:
            loss = functional.cross_entropy(parallel(x), y)
        loss.backward()
        parallel.zero_grad()
    return fold.plan(), sorted(set(rows)), fold.state_dict()["probe"]["halved"]


def test_all_processes_try_half_of_their_rows_if_one_has_too_little_memory():
    (plan, rows, halved), (other_plan, other_rows, _) = returned(run(short_of_memory, 2, 3))
    assert plan == other_plan
    estimates = {site["estimate"] for site in plan["sites"].values()}
    assert estimates & {"re-run", "closed form"}
    assert min(rows) == min(other_rows) <= 3
    assert halved == 1
