# SPDX-License-Identifier: Apache-2.0
"""A resumed run makes the same packets as the uninterrupted one, at every step."""

import copy
import json
import warnings

import backfold
import pytest
import torch
from backfold import codecs
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread", "deterministic")

LAST = 9


class Block(nn.Module):
    """Its depth depends on the step, so that new sites appear late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(24, 48), nn.LayerNorm(48)
        self.second, self.late = nn.Linear(48, 24), nn.Linear(24, 24)

    def forward(self, x, deep: bool):
        y = self.second(functional.gelu(self.norm(self.first(x))))
        return self.late(y.tanh()) if deep else y


class Run:
    """One training, which can be saved after any step."""

    def __init__(self, device: str, deep_from: int = 6, large_at: int = 5, **options) -> None:
        torch.manual_seed(0)
        self.model = Block().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.options = {"probe_steps": (2, 4), "probe_every": None, "min_bytes": 0, **options}
        self.fold = backfold.Controller(self.model, **self.options)
        self.device, self.step, self.deep_from, self.large_at = device, 0, deep_from, large_at

    def forward(self) -> torch.Tensor:
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        rows = 96 if self.step == self.large_at else 64  # larger than any plan knew
        x = torch.randn(rows, 24, generator=generator).to(self.device)
        with self.fold:
            found = self.model(x, self.step >= self.deep_from)
            return functional.cross_entropy(found, x[:, :5].argmax(1))

    def go(self, last: int) -> list:
        """The gradients and held bytes of each step up to `last`."""
        found = []
        while self.step < last:
            loss = self.forward()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
            found.append((self.step, self.fold.report().to_dict()["held_bytes"], gradients))
        return found

    def saved(self) -> dict:
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        fold = json.loads(json.dumps(self.fold.state_dict(), allow_nan=False))
        return copy.deepcopy({"model": model, "optimizer": optimizer, "fold": fold})

    def resumed(self, saved: dict) -> "Run":
        run = Run(self.device, self.deep_from, self.large_at, **self.options)
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.fold.load_state_dict(saved["fold"])
        run.step = self.step
        return run


def assert_same(a: list, b: list) -> None:
    for (step, held, gradients), (other, held_by_other, others) in zip(a, b, strict=True):
        assert (step, held) == (other, held_by_other)
        assert all(torch.equal(x, y) for x, y in zip(gradients, others, strict=True)), step


TARGETS = [
    {"bits": 3.5},
    {"bits": 2},
    {"ratio": 6},
    {"budget": 40000},
    {"bits": 4, "replay": False},
    {"bits": 4, "codec": {"first": codecs.RunningRange(8)}},
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("step", range(1, LAST))
def test_a_run_goes_on_from_any_step(device, target, step):
    plain, run = Run(device, **target), Run(device, **target)
    expected = plain.go(LAST)[step:]
    run.go(step)
    saved = run.saved()
    resumed = run.resumed(saved)
    assert resumed.fold.plan() == run.fold.plan()
    assert_same(run.go(LAST), expected)  # asking for it changes nothing
    assert_same(resumed.go(LAST), expected)
    assert resumed.fold.plan() == plain.fold.plan()


def test_step_100_of_the_default_schedule(device):
    run = Run(device, bits=3, probe_steps=(2, 100, 300))
    run.go(100)
    resumed = run.resumed(run.saved())
    assert run.fold.report().to_dict()["step"] == 100
    assert_same(resumed.go(103), run.go(103))


@pytest.mark.parametrize("target", [{"bits": 3.5}, {"bits": 4, "replay": False}], ids=str)
def test_a_state_between_backward_and_optimizer_has_the_plan(device, target):
    run = Run(device, **target)
    run.go(1)
    run.forward().backward()
    saved = run.saved()
    assert saved["fold"]["plan"] is not None
    assert_same(run.resumed(saved).go(LAST), run.go(LAST))


@pytest.mark.parametrize("target", [{"bits": 3.5}, {"bits": 4, "replay": False}], ids=str)
def test_a_probe_whose_backward_has_not_come_is_taken_again(device, target):
    run = Run(device, probe_steps=(2,), **target)
    run.go(1)
    loss = run.forward()
    saved = run.saved()
    assert saved["fold"]["plan"] is None
    resumed = run.resumed(saved)
    loss.backward()  # of a graph that is not in any file
    assert_same(resumed.go(3), run.go(3))
    assert not run.fold.plan()["sites"]
    assert_same(resumed.go(LAST), run.go(LAST))
    assert run.fold.plan()["sites"] and resumed.fold.plan() == run.fold.plan()


@pytest.mark.parametrize("target", [{"bits": 3.5}, {"bits": 4, "replay": False}], ids=str)
def test_a_state_of_an_open_block_takes_its_probe_again(device, target):
    run = Run(device, probe_steps=(2,), **target)
    run.go(1)
    with run.fold:
        loss = run.model(torch.ones(64, 24, device=device), False).square().mean()
        saved = run.saved()
    loss.backward()
    run.step += 1
    resumed = run.resumed(saved)
    for one in (run, resumed):
        one.go(3)
        assert not one.fold.plan()["sites"]
        one.go(4)
        assert one.fold.plan()["sites"]


@pytest.mark.parametrize("step", [13, 14])
def test_places_that_are_new_when_it_is_saved_are_measured_at_the_same_step(device, step):
    run = Run(device, bits=3.5, deep_from=13, large_at=0)
    run.go(step)
    resumed = run.resumed(run.saved())
    assert_same(resumed.go(17), run.go(17))
    assert resumed.fold.plan() == run.fold.plan()
    assert any(name.startswith("late") for name in run.fold.plan()["sites"])


def test_a_model_that_could_not_be_run_again_is_not_tried_again():
    class Once(Block):
        def forward(self, x, deep):
            if torch.is_grad_enabled() and len(x) < 64:
                raise RuntimeError("not twice")
            return super().forward(x, deep)

    run = Run("cpu", bits=3.5)
    run.model.__class__ = Once
    run.go(4)  # fails with a quarter of the batch, then runs on all of it
    again = run.saved()
    assert again["fold"]["probe"]["whole"]
    resumed = run.resumed(again)
    resumed.model.__class__ = Once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(resumed.go(LAST), run.go(LAST))


@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_part_of_the_batch_that_memory_sufficed_for_is_kept_to(step):
    class Large(Block):
        def forward(self, x, deep):
            if torch.is_grad_enabled() and 4 < len(x) < 64:
                raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
            return super().forward(x, deep)

    run = Run("cpu", bits=3.5)
    run.model.__class__ = Large
    run.go(step)
    saved = run.saved()
    assert saved["fold"]["probe"]["halved"] == 1  # from 6 rows to 4
    resumed = run.resumed(saved)
    resumed.model.__class__ = Large
    assert_same(resumed.go(LAST), run.go(LAST))
    assert resumed.fold.plan() == run.fold.plan()
    assert run.saved()["fold"]["probe"]["halved"] == 1


def test_loading_drops_a_probe_that_waits(device):
    run = Run(device, bits=3.5)
    run.go(1)
    saved = run.saved()
    run.forward().backward()
    run.fold.load_state_dict(saved["fold"])
    run.model.load_state_dict(saved["model"])
    run.step = 1
    resumed = run.resumed(saved)
    assert_same(run.go(LAST), resumed.go(LAST))


def without(state: dict, name: str) -> dict:
    return {key: value for key, value in state.items() if key != name}


def spoiled(state: dict, **changes) -> dict:
    """The state with a value changed that is checked late."""
    state = copy.deepcopy(state)
    for name, value in changes.items():
        state["sites"][-1 if name == "name" else 0].update({name: value})
    return state


BAD = {
    "guard of other parameters": (
        lambda s: {**s, "guard": {**s["guard"], "values": s["guard"]["values"][1:]}},
        "state must come from a guard of the same parameters",
    ),
    "guard without counters": (lambda s: {**s, "guard": {"values": []}}, "has no 'counters'"),
    "no probe": (lambda s: without(s, "probe"), "has no 'probe'"),
    "no plan": (lambda s: without(s, "plan"), "has no 'plan'"),
    "no guard": (lambda s: without(s, "guard"), "has no 'guard'"),
    "half a plan": (lambda s: {**s, "plan": without(s["plan"], "error")}, "has no 'error'"),
    "a probe of words": (
        lambda s: {**s, "probe": {**s["probe"], "last": "two"}},
        'state: last must be an integer, got "two"',
    ),
    "another model": (lambda s: spoiled(s, name="x.y/aten::mm/self/0"), "belongs to another model"),
    "half a tensor": (
        lambda s: spoiled(s, ranges={"shape": [3, 2], "float32": "AAAA"}),
        "must take 24 bytes, got 3",
    ),
}


@pytest.mark.parametrize("change", BAD)
def test_a_bad_state_is_refused_and_changes_nothing(change):
    first, second = Run("cpu", bits=3.5), Run("cpu", bits=3.5, seed=5)
    first.go(3)
    second.go(3)
    spoil, text = BAD[change]
    bad = spoil(first.saved()["fold"])
    before = second.saved()["fold"]
    with pytest.raises(ValueError, match=text):
        second.fold.load_state_dict(bad)
    assert second.saved()["fold"] == before
    expected = Run("cpu", bits=3.5, seed=5).go(LAST)[3:]
    assert_same(second.go(LAST), expected)
