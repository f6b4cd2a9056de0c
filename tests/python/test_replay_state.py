# SPDX-License-Identifier: Apache-2.0
"""A forward that changes the model itself: a replay starts where it did and leaves no trace."""

import collections
import copy
import random
import warnings

import backfold
import numpy
import pytest
import torch
from backfold._replay import ModelCall
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(device: str = "cpu") -> torch.Tensor:
    return torch.linspace(-3, 3, 64 * 12).view(64, 12).sin().to(device)


class Encoders(nn.Module):
    """A momentum encoder: forward moves the weight of `slow` towards that of `fast`."""

    def __init__(self, update) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fast, self.slow = nn.Linear(12, 12), nn.Linear(12, 12).requires_grad_(False)
        self.update = update

    def forward(self, x):
        with torch.no_grad():
            self.update(self.slow.weight, self.fast.weight)
        return self.fast(x) * self.slow(x)


def replaced(slow, fast):
    slow.data = slow.data * 0.9 + fast.data * 0.1


def swapped_for_a_storage(slow, fast):
    slow.set_(slow.lerp(fast, 0.1))


def written_then_replaced(slow, fast):
    slow.mul_(0.9)
    slow.data = slow.data + fast.data * 0.1


UPDATES = [
    lambda slow, fast: slow.lerp_(fast, 0.1),
    lambda slow, fast: slow.data.lerp_(fast, 0.1),
    lambda slow, fast: slow[2:5].t().mul_(0.9),
    lambda slow, fast: torch.add(slow, fast, alpha=0.1, out=slow),
    lambda slow, fast: torch._foreach_lerp_([slow], [fast], 0.1),
    replaced,
    swapped_for_a_storage,
    written_then_replaced,
]
NAMES = ["in place", "data", "view", "out", "foreach", "data =", "set_", "both"]


def recorded(model, x) -> tuple[ModelCall, list[torch.Tensor]]:
    with ModelCall.watch(model, 1.0) as call:
        loss = model(x).square().mean()
    loss.backward()
    return call, [p.grad.clone() for p in model.parameters() if p.requires_grad]


def gradients_again(call: ModelCall) -> list[torch.Tensor]:
    run, found = call.step(), []
    handles = [leaf.register_hook(found.append) for leaf in call.leaves]
    with call.untouched():
        run()
        again, found[:] = [*found], []
        run()
    for handle in handles:
        handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))
    return found


def tensors(model) -> list:
    """Values, versions and memory of the model's parameters and buffers."""
    every = [*model.parameters(), *model.buffers()]
    return [(t.detach().clone(), t._version, t.data_ptr()) for t in every]


def same(a: list, b: list) -> bool:
    return all(torch.equal(x[0], y[0]) and x[1:] == y[1:] for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("update", UPDATES, ids=NAMES)
def test_a_parameter_that_forward_writes_is_what_it_was_before_each_run_and_after(device, update):
    model, x = Encoders(update).to(device), batch(device)
    call, expected = recorded(model, x)
    before = tensors(model)
    for _ in range(2):
        found = gradients_again(call)
        assert len(found) == len(expected)  # in the order in which they arrive
        for gradient in expected:
            assert any(torch.equal(gradient, one) for one in found if one.shape == gradient.shape)
    assert same(tensors(model), before)


def test_a_parameter_that_was_changed_after_the_call_starts_as_it_is_now():
    seen = []

    def update(slow, fast):
        seen.append(slow.detach().clone())
        slow.lerp_(fast, 0.1)

    model = Encoders(update)
    call, _ = recorded(model, batch())
    with torch.no_grad():
        model.slow.weight.mul_(2)
    before = tensors(model)
    gradients_again(call)
    assert torch.equal(seen[1], before[2][0])
    assert torch.equal(seen[2], before[2][0])
    assert same(tensors(model), before)


def test_a_trained_parameter_that_forward_writes_moves_in_the_first_run_of_a_probe():
    """Restoring the copy from before the call would undo the move that gives the tangents."""
    found = []

    def update(slow, fast):
        found.append(fast.detach().clone())
        fast.clamp_(-0.2, 0.2)

    model = Encoders(update)
    fold = backfold.Controller(model, bits=4, min_bytes=0, probe_steps=(2,))
    for _ in range(2):
        with fold:
            loss = model(batch()).square().mean()
        loss.backward()
    before = tensors(model)
    with fold:
        pass
    assert fold.plan()["sites"]
    own, moved, clean = found[1:]
    assert not torch.equal(moved, own)
    assert torch.equal(clean, own)
    assert same(tensors(model), before)


@pytest.mark.parametrize("update", UPDATES, ids=NAMES)
def test_calibrate_and_check_leave_parameters_that_a_step_writes(device, update):
    model, x = Encoders(update).to(device), batch(device)
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    before = tensors(model)
    fold.calibrate(lambda: model(x).square().mean().backward())
    assert all(torch.equal(a[0], b[0]) for a, b in zip(tensors(model), before, strict=True))
    fold.calibrate(lambda: model(x).square().mean().backward(), "exact")
    assert all(torch.equal(a[0], b[0]) for a, b in zip(tensors(model), before, strict=True))
    fold.check(lambda: model(x).square().mean(), 2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(tensors(model), before, strict=True))


class Meter:
    def __init__(self) -> None:
        self.total, self.values, self.inner = 0.0, [], None

    def add(self, value: float) -> None:
        self.total += value
        self.values.append(value)
        if self.inner is not None:
            self.inner.add(value)


class Hoarder(nn.Module):
    """Changes what it holds in every way that can be undone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(12, 12)
        self.losses: list[torch.Tensor] = []
        self.counts = collections.Counter(calls=0)
        self.nested = {"recent": collections.deque([1, 2], maxlen=2), "seen": {3}}
        self.calls = 0
        self.meter = Meter()
        self.queue = torch.zeros(4, 12)
        self.tables = ({"rows": torch.zeros(3)},)
        self.array = numpy.zeros(3)
        self.generator = torch.Generator().manual_seed(1)
        self.generators = [numpy.random.default_rng(1), numpy.random.RandomState(1)]
        self.random = random.Random(1)

    def forward(self, x):
        self.calls += 1
        draws = [torch.rand((), generator=self.generator), self.random.random()]
        draws += [self.generators[0].random(), self.generators[1].rand()]
        y = self.linear(x) * sum(draws) + self.calls + len(self.losses) + self.queue.sum()
        y = y + self.tables[0]["rows"].sum() + float(self.array.sum()) + self.meter.total
        y = y + self.nested["recent"][-1] + len(self.nested["seen"])
        self.losses.append(y.detach().mean())
        self.counts["calls"] += 1
        self.nested["recent"].append(self.calls)
        self.nested["seen"].add(self.calls + 10)
        self.meter.add(1.0)
        self.queue[0] = y.detach().mean(0)
        self.tables[0]["rows"].add_(1)
        self.array += 1
        self.late = getattr(self, "late", 0) + 1
        return y


def held_by(model: Hoarder) -> list:
    return copy.deepcopy(
        [
            [float(loss) for loss in model.losses],
            model.counts,
            model.nested,
            model.calls,
            vars(model.meter),
            model.queue.tolist(),
            model.tables[0]["rows"].tolist(),
            model.array.tolist(),
            model.generator.get_state().tolist(),
            model.generators[0].bit_generator.state,
            model.generators[1].get_state()[1].tolist(),
            model.random.getstate(),
            model.late,
        ]
    )


def test_what_modules_hold_is_what_it_was_before_each_run_and_after():
    model, x = Hoarder(), batch()
    model(x)
    call, expected = recorded(model, x)
    before, lists = held_by(model), model.losses
    found = gradients_again(call)
    for gradient in expected:
        assert any(torch.equal(gradient, one) for one in found if one.shape == gradient.shape)
    assert held_by(model) == before
    assert model.losses is lists
    assert not call.left_changed


def test_calibrate_and_check_leave_what_modules_hold():
    model, x = Hoarder(), batch()
    model(x)
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    before = held_by(model)
    fold.calibrate(lambda: model(x).square().mean().backward())
    assert held_by(model) == before
    fold.check(lambda: model(x).square().mean(), 2)
    assert held_by(model) == before


def test_layers_that_forward_makes_are_those_that_were_there():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.built = False
            self.scale = nn.Parameter(torch.ones(12))

        def forward(self, x):
            if not self.built:
                self.built, self.linear = True, nn.Linear(12, 12)
            return self.linear(x) * self.scale

    model, x = Lazy(), batch()
    call, _ = recorded(model, x)
    linear, weight = model.linear, model.linear.weight.detach().clone()
    gradients_again(call)
    assert model.linear is linear
    assert torch.equal(model.linear.weight, weight)
    assert model.built


def test_what_cannot_be_undone_is_named_once():
    model, x = Hoarder(), batch()
    model.meter.inner = Meter()
    fold = backfold.Controller(model, bits=4, min_bytes=0, probe_steps=(2, 4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            with fold:
                loss = model(x).square().mean()
            loss.backward()
    (text,) = (str(one.message) for one in told if "running the model again" in str(one.message))
    assert "changed meter.inner (Meter), which cannot be undone" in text


def test_a_model_that_writes_to_parameters_unseen_is_not_run_again():
    calls = []

    def update(slow, fast):
        calls.append(slow.sum().item())
        slow.detach().numpy()[:] += 1
        torch.autograd.graph.increment_version(slow)

    model = Encoders(update)
    fold = backfold.Controller(model, bits=4, min_bytes=0, probe_steps=(2,), probe_every=None)
    with pytest.warns(UserWarning, match=r"it writes to slow.weight without using torch"):
        for _ in range(4):
            with fold:
                loss = model(batch()).square().mean()
            loss.backward()
    assert len(calls) == 4
    assert fold.plan()["sites"]
