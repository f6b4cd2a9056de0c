# SPDX-License-Identifier: Apache-2.0
"""What a plan weighs beside widths: packets of their own for derived tensors, and time."""

import collections

import backfold
import pytest
import torch
from derivation import assert_same_bits, gradients, sites
from torch import nn
from torch.nn import functional


class SmallReader(nn.Module):
    """An eighth of what `first` makes is read by a layer whose gradient is most of all there is."""

    def __init__(self, scale: float):
        super().__init__()
        self.first, self.large, self.small = (nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("rows", torch.arange(0, 512, 8))
        self.scale = scale

    def forward(self, x):
        h = self.first(x)
        large = self.large(functional.gelu(h))
        small = self.small(h.index_select(0, self.rows))
        return 1e-2 * large.square().mean() + self.scale * small.square().mean()


def planned(scale: float, loaded: bool = False) -> list[dict]:
    torch.manual_seed(0)
    model, x = SmallReader(scale), torch.randn(512, 64)
    fold = backfold.Controller(model, ratio=9.0, min_bytes=0)
    for _ in range(2):
        with fold:
            loss = model(x)
        loss.backward()
    fold.calibrate(lambda: model(x).backward())
    if loaded:
        fold = backfold.Controller(model, plan=fold.plan(), min_bytes=0)
    with fold:
        loss = model(x)
    loss.backward()
    return sites(fold, module="small", slot="mat1")


@pytest.mark.parametrize("loaded", [False, True])
def test_a_small_tensor_that_matters_gets_a_packet_of_its_own(loaded):
    (row,) = planned(scale=1e3, loaded=loaded)
    assert row["kind"] == "lossy"
    assert row["bits"] == 16


def test_a_plan_lists_places_by_name():
    torch.manual_seed(0)
    parts = {"z": nn.Linear(64, 64), "y": nn.GELU(), "b": nn.Linear(64, 64), "a": nn.Tanh()}
    model, x = nn.Sequential(collections.OrderedDict(parts)), torch.randn(512, 64)
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    fold.calibrate(lambda: model(x).square().mean().backward())
    names = list(fold.plan()["sites"])
    assert len(names) > 2 and names == sorted(names)


def test_a_small_tensor_that_matters_little_is_derived():
    (row,) = planned(scale=1e-6)
    assert row["kind"] == "derived"


def test_a_plan_that_would_drown_the_gradient_takes_more_bits():
    """Leaving the worst tensors unfolded once took 45% of the memory at 2 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    fold.calibrate(lambda: model(x).square().mean().backward())
    state = fold.state_dict()
    assert not state["plan"]["raised"]
    state["gradient_energy"] = state["plan"]["error"]  # a quarter of it is allowed
    fold.load_state_dict(state)
    with pytest.warns(UserWarning, match="with bits=4 rounding would drown the gradient in noise"):
        fold._core.replan()
    plan = fold.state_dict()["plan"]
    assert plan["raised"] and plan["kept"] == []
    assert plan["error"] <= 0.25 * state["gradient_energy"]
    assert 4 < plan["mean_bits"] <= 8


def long_way(x: torch.Tensor) -> torch.Tensor:
    """Four copies, none of which a kernel makes while it decodes."""
    return x.roll(1, 0).flip(0).roll(3, 1).flip(1)


def kind_of_the_copy(**options) -> str:
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    x = torch.randn(256, 64)
    fold = backfold.Controller(min_bytes=0, **options)
    with fold:
        h = first(x)
        loss = functional.gelu(h).sum() + second(long_way(h)).sum()
    del h
    loss.backward()
    return sites(fold, op="aten::addmm", slot="mat1")[-1]["kind"]


def test_a_rounded_tensor_is_not_derived_the_long_way():
    assert kind_of_the_copy(bits=4, adaptive=False) == "lossy"


def test_exact_tensors_are_derived_the_long_way():
    assert kind_of_the_copy(bits=None) == "derived"


def test_bytes_that_were_asked_for_come_before_time():
    assert kind_of_the_copy(ratio=6.0) == "derived"
    assert kind_of_the_copy(plan={"bits": 4, "sites": {}}) == "derived"


class PickedThenJoined(nn.Module):
    """Every fourth row of what `first` makes is read by two branches and joined with their results.

    The joined rows cannot be made from all that: they have three large sources then, and two if the
    picked rows, a quarter of them, are stored.
    """

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(256, 8)
        self.branches = nn.ModuleList(nn.Linear(64, 96) for _ in range(2))
        self.register_buffer("rows", torch.arange(0, 1024, 4))

    def forward(self, x):
        picked = torch.tanh(self.first(x)).index_select(0, self.rows)
        parts = [torch.tanh(branch(picked)) for branch in self.branches]
        return self.last(torch.cat([picked, *parts], 1)).square()


@pytest.mark.parametrize("bits", [None, 4])
def test_a_small_tensor_is_stored_where_a_large_one_is_made_of_it(device, bits):
    torch.manual_seed(0)
    model, x = PickedThenJoined().to(device), torch.randn(1024, 16, device=device)
    leaves = list(model.parameters())
    expected = gradients(lambda: model(x), leaves)
    options = {} if bits is None else {"adaptive": False}
    fold = backfold.Controller(model, bits=bits, min_bytes=0, **options)
    held = []
    for _ in range(4):
        found = gradients(lambda: model(x), leaves, fold)
        if bits is None:
            assert_same_bits(found, expected)
        held.append(fold.report().to_dict()["held_bytes"])
    (picked,) = sites(fold, module="branches.0", slot="mat1")
    (joined,) = sites(fold, module="last", slot="mat1")
    assert picked["kind"] != "derived" and joined["kind"] == "derived"
    assert joined["recipe"] == "cat"
    # All of what the joined rows took, less the quarter that is stored now.
    assert held[0] - held[-1] > 0.7 * joined["saved_bytes"] / 32 * (bits or 32)
    assert held[2] == held[3]
    again = backfold.Controller(model, bits=bits, min_bytes=0, **options)
    again.load_state_dict(fold.state_dict())
    gradients(lambda: model(x), leaves, again)
    assert again.report().to_dict()["held_bytes"] == held[-1]
