# SPDX-License-Identifier: Apache-2.0
"""A model that owns its controller: it dies with the model, and is copied and saved with it."""

import copy
import gc
import io
import pickle
import weakref

import backfold
import pytest
import torch
from backfold import codecs
from small_network import batch, equal, network
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Owner(nn.Module):
    def __init__(self, device: str = "cpu", **options) -> None:
        super().__init__()
        self.net = network(device)
        self.fold = backfold.Controller(
            self, bits=3.5, min_bytes=0, probe_steps=(2, 5), **{"seed": 3, **options}
        )

    def forward(self, x):
        return self.net(x)


def train(model: Owner, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Gradients of the last step."""
    for _ in range(steps):
        model.zero_grad()
        with model.fold:
            loss = model(x * 2).square().mean()
        loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("steps", range(5))
def test_a_controller_dies_with_the_model_that_owns_it(device, steps):
    model = Owner(device)
    train(model, batch(device), steps)  # after step 2 a recorded call waits
    died = [weakref.ref(one) for one in (model, model.net[1].weight, model.fold)]
    del model
    gc.collect()
    assert [one() for one in died] == [None] * 3


def test_so_does_the_controller_under_the_name_of_gact():
    model = network()
    model.controller = backfold.controller(model)
    died = weakref.ref(model)
    del model
    gc.collect()
    assert died() is None


def test_a_controller_that_outlives_its_users_keeps_the_model():
    fold = backfold.Controller(network(), bits=4, min_bytes=0)
    gc.collect()
    with fold:
        loss = fold._model(batch()).sum()
    loss.backward()
    assert fold.steps == 1


def copied(model: Owner) -> Owner:
    return copy.deepcopy(model)


def pickled(model: Owner) -> Owner:
    return pickle.loads(pickle.dumps(model))


def saved(model: Owner) -> Owner:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copied, pickled, saved]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [0, 1, 3, 4])
def test_a_copy_goes_on_as_the_original(device, way, steps):
    model, x = Owner(device), batch(device)
    train(model, x, steps)
    other = way(model)
    assert other.fold is not model.fold
    assert other.fold._model is other
    assert other.fold.steps == steps
    assert other.fold.plan() == model.fold.plan()
    for _ in range(5):
        assert equal(train(other, x, 1), train(model, x, 1))
    assert model.fold.steps == other.fold.steps == steps + 5
    assert other.fold.plan() == model.fold.plan()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("way", [pickled, saved])
def test_what_is_saved_at_a_probe_step_goes_on_as_the_original(device, way):
    model, x = Owner(device), batch(device)
    train(model, x, 2)
    other = way(model)
    assert equal(train(other, x, 4), train(model, x, 4))


@pytest.mark.usefixtures("deterministic")
def test_a_copy_at_a_probe_step_leaves_the_original_alone(device):
    model, plain, x = Owner(device), Owner(device), batch(device)
    for one in (model, plain):
        train(one, x, 2)
    other = copy.deepcopy(model)
    assert not model.fold.plan()["sites"]
    assert equal(train(model, x, 2), train(plain, x, 2))
    train(other, x, 2)
    assert other.fold.plan()["sites"]


def test_the_copy_of_a_dead_model_lives(device):
    model = Owner(device)
    train(model, batch(device), 3)
    other = copy.deepcopy(model)
    died = weakref.ref(model)
    del model
    gc.collect()
    assert died() is None
    train(other, batch(device), 2)
    assert other.fold.steps == 5


def test_options_go_along(tmp_path):
    model = network()
    plan = backfold.Controller(model, bits=4, min_bytes=0)
    plan.calibrate(lambda: model(batch()).sum().backward())
    plan.save_plan(tmp_path / "plan.json")
    for options in (
        {"ratio": 6, "probe_fraction": 0.5, "replay": False, "keep": [model[1], "0.2"]},
        {"budget": "1GiB", "codec": {nn.Linear: codecs.Exact()}, "menu": iter([codecs.Project(4)])},
        {"level": "L2", "sync": False, "probe_steps": (i for i in (3, 1)), "probe_every": 7},
        {"plan": tmp_path / "plan.json"},
        {"bits": None},
        {"bits": 4, "adaptive": False},
    ):
        model.fold = backfold.Controller(model, **options)
        if "plan" in options:
            options["plan"].unlink()  # what was read is carried along, not the path
        other = pickle.loads(pickle.dumps(model))
        mine, its = model.fold._options, other.fold._options
        assert its["model"] is other
        assert its["keep"] == ((other[1], "0.2") if "keep" in options else ())
        for name in mine.keys() - {"model", "keep"}:
            assert mine[name] == its[name], name
        assert other.fold.plan() == model.fold.plan()


def test_a_controller_of_gact_is_copied_without_its_hook():
    model = network()
    model.controller = backfold.controller(model, min_bytes=0)
    model.controller.install_hook()
    other = copy.deepcopy(model)
    model.controller.uninstall_hook()
    with pytest.raises(RuntimeError, match="call install_hook"):
        other.controller.iterate(lambda: None)
    other.controller.install_hook()
    other(batch()).sum().backward()
    other.controller.uninstall_hook()
    assert other.controller.fold.steps == 1
    assert model.controller.fold.steps == 0


def test_what_a_controller_does_not_have_is_said():
    with pytest.raises(AttributeError, match="'Controller' object has no attribute 'stpes'"):
        backfold.Controller().stpes  # noqa: B018
