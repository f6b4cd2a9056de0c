# SPDX-License-Identifier: Apache-2.0
"""A budget that is not kept without it: what the plan has leave the device."""

import re
import warnings

import backfold
import pytest
import torch
from derivation import assert_same_bits
from test_offload import perceptron, settled
from torch import nn

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is kept by offloading"),
]


def step(model, x, fold=None):
    """The report once copies have ended, and the gradients."""
    model.zero_grad(set_to_none=True)
    if fold is None:
        loss, report = model(x).square().mean(), None
    else:
        with fold:
            loss = model(x).square().mean()
        report = settled(fold)
    loss.backward()
    return report, [p.grad.clone() for p in model.parameters()]


def lowest_without(model, x, **options):
    """The lowest budget that is possible if nothing leaves, as the error says."""
    fold = backfold.Controller(model, budget=1000, offload=False, **options)
    with pytest.raises(ValueError, match="budget=1000 bytes cannot be met") as error:
        for _ in range(3):
            step(model, x, fold)
    return int(re.search(r"the lowest possible is (\d+) bytes", str(error.value))[1])


def trained(model, x, steps=4, **options):
    fold = backfold.Controller(model, **options)
    for _ in range(steps):
        report, _ = step(model, x, fold)
    return fold, report


@pytest.mark.parametrize("part", [0.8, 0.55])
def test_exact_tensors_are_bitwise_the_same_below_what_products_reach(device, deterministic, part):
    model, x = perceptron(device)
    expected = step(model, x)[1]
    budget = int(part * lowest_without(model, x, bits=None))
    fold = backfold.Controller(model, bits=None, budget=budget)
    for i in range(4):
        report, gradients = step(model, x, fold)
        assert_same_bits(gradients, expected)
        if i >= 2:
            assert report["held_bytes"] <= budget
    assert report["offloaded_bytes"] == report["remade"]["sent_bytes"] > 0
    assert report["remade"]["held_bytes"] <= budget
    assert "offloaded, as the budget needs" in str(fold.report())


@pytest.mark.parametrize("derive", [True, False])
def test_a_budget_below_what_the_fewest_bits_take_is_kept(device, derive):
    model, x = perceptron(device)
    budget = int(0.5 * lowest_without(model, x, derive=derive))
    fold, report = trained(model, x, 5, budget=budget, derive=derive, probe_steps=(2,))
    assert report["held_bytes"] <= budget
    assert report["offloaded_bytes"] > 0.99 * report["plan"]["sent_bytes"] > 0  # but for headers
    assert report["plan"]["held_bytes"] <= budget
    assert "MiB offloaded, as the budget needs" in str(fold.report())


def test_rounding_to_a_budget_is_the_same_wherever_packets_are(device, deterministic):
    """The plan of a run that offloads, used by one in which nothing leaves."""
    model, x = perceptron(device)
    budget = int(0.5 * lowest_without(model, x))
    fold, _ = trained(model, x, budget=budget, probe_steps=(2,))
    plan = fold.plan()
    assert plan["offloaded"] == sorted(plan["offloaded"]) != []
    away = backfold.Controller(model, plan=plan)
    here = backfold.Controller(
        model, plan={name: value for name, value in plan.items() if name != "offloaded"}
    )
    reports = []
    for _ in range(2):
        report, found = step(model, x, away)
        other, expected = step(model, x, here)
        assert_same_bits(found, expected)
        reports.append((report, other))
    report, other = reports[-1]
    assert report["offloaded_bytes"] > 0 == other["offloaded_bytes"]
    assert report["held_bytes"] + report["offloaded_bytes"] == other["held_bytes"]


@pytest.mark.parametrize("options", [{"bits": None}, {"probe_steps": (2,)}])
def test_copies_under_way_are_within_the_budget(device, options):
    model, x = perceptron(device)
    budget = int(0.55 * lowest_without(model, x, **options))
    fold, _ = trained(model, x, budget=budget, **options)
    held = []
    for _ in range(4):
        with fold:
            loss = model(x).square().mean()
        report = fold.report().to_dict()
        held.append(report["held_bytes"])
        assert report["held_bytes"] + report["offloaded_bytes"] > 1.5 * budget
        loss.backward()
    assert max(held) <= budget


def test_nothing_leaves_where_a_budget_is_kept_anyway(device):
    model, x = perceptron(device)
    _, report = trained(model, x, budget="1GiB", probe_steps=(2,))
    assert report["offloaded_bytes"] == report["plan"]["sent_bytes"] == 0


@pytest.mark.parametrize("options", [{"bits": 4}, {"ratio": 12}, {"peak": "1GiB"}])
def test_other_targets_offload_nothing(device, options):
    model, x = perceptron(device)
    _, report = trained(model, x, probe_steps=(2,), **options)
    assert report["offloaded_bytes"] == 0


def test_what_the_program_holds_as_well_is_learned_to_stay(device):
    """The input of each layer stays in a list, so that only gelu's and the norm's can leave."""

    class Keeps(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body
            self.kept = []

        def forward(self, x):
            self.kept = []
            for layer in self.body:
                if isinstance(layer, nn.Linear):
                    self.kept.append(x)
                x = layer(x)
            return x

    model, x = perceptron(device)
    model = Keeps(model)
    expected = step(model, x)[1]
    fold = backfold.Controller(model, bits=None, derive=True)
    whole = step(model, x, fold)[0]["held_bytes"]
    fold = backfold.Controller(model, bits=None, budget=int(0.5 * whole))
    for _ in range(6):
        report, gradients = step(model, x, fold)
        assert_same_bits(gradients, expected)
    assert report["held_bytes"] <= 0.5 * whole


def test_a_larger_batch_is_planned_for(device):
    model, x = perceptron(device)
    budget = int(0.5 * lowest_without(model, x))
    fold = backfold.Controller(model, budget=budget, probe_steps=(2,))
    for rows in (128, 128, 128, 256, 256, 256, 256):
        report, _ = step(model, x[:rows], fold)
    assert report["held_bytes"] <= budget


def test_a_run_that_is_continued_offloads_the_same(device, deterministic):
    model, x = perceptron(device)
    budget = int(0.5 * lowest_without(model, x))
    first, _ = trained(model, x, budget=budget, probe_steps=(2,))
    second = backfold.Controller(model, budget=budget, probe_steps=(2,))
    second.load_state_dict(first.state_dict())
    report, gradients = step(model, x, first)
    again, continued = step(model, x, second)
    assert_same_bits(continued, gradients)
    assert again["offloaded_bytes"] == report["offloaded_bytes"] > 0


def test_one_warning_says_what_keeps_the_budget(device):
    model, x = perceptron(device)
    budget = int(0.5 * lowest_without(model, x))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained(model, x, budget=budget, probe_steps=(2, 4))
    told = [str(one.message) for one in told if "offloading" in str(one.message)]
    where = "a file in" if device == "cpu" else "pinned"
    assert len(told) == 1
    assert re.search(
        rf"budget={budget} bytes is kept by offloading \d+ bytes to {where}.*; "
        "offload=False rules that out",
        told[0],
    )


def test_a_warning_that_is_an_error_leaves_no_block_open(device):
    model, x = perceptron(device)
    budget = int(0.5 * lowest_without(model, x))
    fold = backfold.Controller(model, budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="is kept by offloading"):
            for _ in range(4):
                step(model, x, fold)
    assert step(model, x, fold)[0]["held_bytes"] <= budget


def test_what_is_impossible_even_so_is_an_error(device):
    """The smaller tensors stay: what is offloaded in small pieces takes longer than it spares."""
    torch.manual_seed(0)
    body = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model, x = nn.Sequential(*body).to(device), torch.randn(128, 64, device=device)
    fold = backfold.Controller(model, budget=1000, min_bytes=0)
    with pytest.raises(ValueError, match="budget=1000 bytes cannot be met"):
        for _ in range(4):
            step(model, x, fold)


def test_a_plan_that_offloads_is_not_for_offload_false(device):
    model, x = perceptron(device)
    plan = trained(model, x, bits=4, probe_steps=(2,))[0].plan()
    name = sorted(plan["sites"])[0]
    with pytest.raises(ValueError, match="1 places are offloaded, which offload=False rules out"):
        backfold.Controller(model, plan={**plan, "offloaded": [name]}, offload=False)
    for wrong in (1, [1], {"a": 1}):
        with pytest.raises(ValueError, match="'offloaded' must be a list of site names"):
            backfold.Controller(model, plan={**plan, "offloaded": wrong})
    with pytest.raises(ValueError, match="belongs to another model"):
        backfold.Controller(model, plan={**plan, "offloaded": ["other.weight/aten::mul/self/0"]})


def test_a_transformer_of_others_trains_within_a_budget(device, deterministic):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=500)
    model = transformers.GPT2LMHeadModel(config).to(device).eval()
    words = torch.randint(0, 500, (16, 64), device=device)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, words):
            return self.model(words, labels=words).loss

    whole = Loss()
    expected = step(whole, words)[1]
    budget = int(0.7 * lowest_without(whole, words, bits=None))
    fold = backfold.Controller(whole, bits=None, budget=budget)
    for _ in range(5):
        report, gradients = step(whole, words, fold)
        assert_same_bits(gradients, expected)
    assert report["held_bytes"] <= budget
    assert report["offloaded_bytes"] > 0
