# SPDX-License-Identifier: Apache-2.0
"""An attached model folds its own calls, and is the same model to everybody else."""

import copy
import doctest
import gc
import io
import pickle
import threading
import warnings
import weakref

import backfold
import pytest
import torch
from backfold import _C, _outermost, _run_log
from small_network import batch, equal
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"bits": 3.5, "min_bytes": 0, "probe_steps": (2, 4), "probe_every": None}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 8)

    def forward(self, x, fails=False):
        y = functional.gelu(self.norm(self.first(x)))
        if fails:
            raise KeyboardInterrupt
        return self.last(y)


def network(device: str = "cpu") -> Network:
    torch.manual_seed(0)
    return Network().to(device)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), x[:, :8].argmax(1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def train(model: nn.Module, forward, steps: int, accumulate: int = 1) -> list:
    """The gradients of each step of a training run."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    device = next(model.parameters()).device
    found = []
    for step in range(steps):
        for part in range(accumulate):
            generator = torch.Generator().manual_seed(step * accumulate + part)
            forward(torch.randn(64, 64, generator=generator).to(device)).backward()
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


def same(a: list, b: list) -> bool:
    return all(equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("module", [backfold._attach, _outermost])
def test_examples_of_the_documentation_run(module):
    results = doctest.testmod(module)
    assert results.attempted > 3 and results.failed == 0


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_attached_model_trains_as_one_inside_a_block(device, accumulate, mode):
    inside = network(device).train(mode == "train")
    controller = backfold.Controller(inside, **OPTIONS)

    def in_block(x):
        with controller:
            y = inside(x)
        return functional.cross_entropy(y, x[:, :8].argmax(1))

    model = network(device).train(mode == "train")
    fold = backfold.attach(model, **OPTIONS)
    expected = train(inside, in_block, 6, accumulate)
    assert same(train(model, lambda x: loss_of(model, x), 6, accumulate), expected)
    assert fold.steps == controller.steps == 6 * accumulate
    assert fold.plan()["sites"] and fold.plan() == controller.plan()
    assert fold.report().to_dict() == controller.report().to_dict()
    plain = network(device).train(mode == "train")
    assert not same(train(plain, lambda x: loss_of(plain, x), 6, accumulate), expected)


def test_a_block_around_the_loss_includes_it():
    model, x = network(), batch()
    fold = backfold.attach(model, bits=4, min_bytes=0)
    loss_of(model, x).backward()
    assert "aten::_log_softmax" not in {row["op"] for row in fold.report().to_dict()["sites"]}
    with fold:
        with pytest.raises(RuntimeError, match="cannot be inside itself"), fold:
            pass
        loss = loss_of(model, x)
    loss.backward()
    assert "aten::_log_softmax" in {row["op"] for row in fold.report().to_dict()["sites"]}
    assert fold.steps == 2


def test_figures_for_a_log_have_the_noise_once_it_is_measured():
    model = network()
    log = _run_log.RunLog(backfold.attach(model, **OPTIONS))
    with pytest.warns(UserWarning, match="no call of the attached model was folded yet"):
        assert log.metrics() == {}
    train(model, lambda x: loss_of(model, x), 2)
    found = log.metrics()
    assert found["fold_held_mib"] < found["fold_saved_mib"] / 4 and "fold_noise" not in found
    train(model, lambda x: loss_of(model, x), 100)
    assert 0 < log.metrics()["fold_noise"] < 10


def test_detach_gives_the_model_back():
    model, x = network(), batch()
    loss_of(model, x).backward()
    plain = gradients(model)
    fold = backfold.attach(model, bits=4, min_bytes=0)
    assert fold.is_attached and backfold.attached(model) is fold
    late = loss_of(model, x)
    fold.detach()
    fold.detach()
    assert type(model) is Network and backfold.attached(model) is None
    model.zero_grad()
    loss_of(model, x).backward()
    assert equal(gradients(model), plain) and fold.steps == 1
    late.backward()  # of a call that was folded
    fold.attach()
    loss_of(model, x)
    assert fold.steps == 2 and backfold.attached(nn.Sequential(model)) is fold


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_are_plain(mode):
    model, x = network(), batch()
    fold = backfold.attach(model, **OPTIONS)
    with mode():
        model(x)
    assert fold.steps == 0 and not fold.report().to_dict()["sites"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_gives_back_memory_that_steps_reuse(mode, monkeypatch):
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU())
    fold = backfold.attach(model, **OPTIONS)
    x = torch.randn(4096, 64)
    model(x).sum().backward()
    kept = _C.bytes_kept_for_reuse()
    assert kept >= 4096 * 512 // 2  # packets of 4 bits, and what was decoded
    with mode():
        model(x)
        assert _C.bytes_kept_for_reuse() == kept  # a rollout between two steps
        monkeypatch.setattr("backfold._attach.IDLE_SECONDS", 0.0)
        model(x)
    assert _C.bytes_kept_for_reuse() == 0
    assert fold.is_attached


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle of protocol 2": lambda model: pickle.loads(pickle.dumps(model, 2)),
}


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"backfold" not in file.getvalue()  # whoever reads the file needs no Backfold
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [*COPIES.values(), saved_and_loaded], ids=[*COPIES, "torch.save"])
def test_copies_have_the_class_of_the_model_and_are_not_attached(make):
    model, x = network(), batch()
    keys = list(model.state_dict())
    fold = backfold.attach(model, **OPTIONS)
    loss_of(model, x).backward()
    made = make(model)
    assert type(made) is Network and backfold.attached(made) is None
    assert list(model.state_dict()) == list(made.state_dict()) == keys
    loss_of(made, x).backward()
    assert fold.steps == 1 and backfold.attached(model) is fold


def test_copies_of_odd_modules_work():
    x = batch()
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
    averaged = torch.optim.swa_utils.AveragedModel(network())
    sequence = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    for model in (traced, averaged, sequence):
        fold = backfold.attach(model, bits=4, min_bytes=0)
        made = copy.deepcopy(model)
        assert torch.equal(made(x), model(x)) and fold.steps == 1
    assert torch.equal(sequence[:1](x), sequence[0](x)) and fold.steps == 1  # type(self)(...)


def test_a_class_that_others_build_on_the_attached_one_stays_theirs():
    model, x = nn.Linear(64, 64), batch()
    fold = backfold.attach(model, bits=4, min_bytes=0)
    nn.utils.parametrizations.weight_norm(model)
    expected = model(x)
    made = copy.deepcopy(model)
    assert torch.equal(made(x), expected) and fold.steps == 1
    fold.detach()
    assert torch.equal(model(x), expected) and fold.steps == 1
    assert backfold.attached(model) is None and backfold.attached(made) is None
    again = backfold.attach(model, bits=4, min_bytes=0)
    model(x)
    assert again.steps == 1 and fold.steps == 1


def test_an_average_follows_an_attached_model():
    model, x = network(), batch()
    backfold.attach(model, **OPTIONS)
    average = torch.optim.swa_utils.AveragedModel(model)
    loss_of(model, x).backward()
    torch.optim.SGD(model.parameters(), 1).step()
    average.update_parameters(model)
    assert type(average.module) is Network and torch.equal(average(x), model(x))


def test_a_fold_that_its_model_owns_is_copied_and_freed_with_it():
    model, x = network(), batch()
    model.fold = backfold.attach(model, **OPTIONS)
    for _ in range(3):
        loss_of(model, x).backward()
    twin = copy.deepcopy(model)
    assert twin.fold.steps == 3 and not twin.fold.is_attached and twin.fold._model is twin
    loss_of(twin, x)
    assert twin.fold.steps == 3
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None


def test_attaching_twice_is_refused():
    model = network()
    whole = nn.Sequential(nn.ReLU(), model)
    backfold.attach(model)
    with pytest.raises(ValueError, match="model is attached already: call detach"):
        backfold.attach(model, bits=2)
    with pytest.raises(ValueError, match="has a part that is attached already, '1'"):
        backfold.attach(whole)
    with pytest.raises(ValueError, match="is a part, 'first', of a model that is attached already"):
        backfold.attach(model.first)


def test_what_cannot_be_attached_is_refused_and_stays_as_it_is():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got function"):
        backfold.attach(loss_of)
    with pytest.raises(TypeError, match="must not be a ScriptModule"):
        backfold.attach(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got NoneType"):
        backfold.attached(None)
    model = network()
    with pytest.raises(ValueError, match="bits"):
        backfold.attach(model, bits=17)
    assert type(model) is Network


def test_an_exception_ends_the_block_of_its_call():
    model, x = network(), batch()
    fold = backfold.attach(model, **OPTIONS)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(x, fails=True)
        with pytest.raises(TypeError):
            model()
    steps = fold.steps
    loss_of(model, x).backward()
    assert fold.steps == steps + 1


def test_several_calls_before_one_backward(device):
    # A pair of calls, as of a discriminator; the second probe is due while the first waits.
    model, x = network(device), batch(device)
    fold = backfold.attach(model, **{**OPTIONS, "probe_steps": (2, 3, 5)})
    for step in range(4):
        (model(x).square().mean() - model(-x).abs().mean()).backward()
        assert fold.steps == 2 * step + 2
    assert fold.plan()["sites"]


def test_a_model_that_calls_itself_is_one_step():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x, depth=3):
            x = self.layer(x).tanh()
            return self(x, depth - 1) if depth else x

    model = Recursive()
    fold = backfold.attach(model, **OPTIONS)
    train(model, lambda x: model(x).square().mean(), 5)
    assert fold.steps == 5 and fold.plan()["sites"]
    assert sum(row["saves"] for row in fold.report().to_dict()["sites"]) >= 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_and_around(reentrant):
    class Checkpointed(Network):
        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=reentrant)
            return self.last(functional.gelu(self.norm(x)))

    x = batch().requires_grad_()
    torch.manual_seed(0)
    model = Checkpointed()
    fold = backfold.attach(model, **OPTIONS)
    train(model, lambda x: loss_of(model, x.requires_grad_()), 5)
    assert fold.steps == 5 and fold.plan()["sites"]

    # What a checkpoint around the model drops, nobody keeps, and what it makes again is no step.
    model = network()
    loss_of(model, x).backward()
    plain = gradients(model)
    fold = backfold.attach(model, **OPTIONS)
    model.zero_grad()
    y = checkpoint(model, x, use_reentrant=reentrant)
    functional.cross_entropy(y, x[:, :8].argmax(1)).backward()
    assert fold.steps == 0 and equal(gradients(model), plain)


def test_functional_transforms_run_as_they_are_with_one_warning():
    model, x = network(), batch()
    fold = backfold.attach(model, **OPTIONS)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    with pytest.warns(UserWarning, match=r"inside of torch\.func\); it is not folded"):
        found = torch.func.grad(loss)(parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.grad(loss)(parameters)
    assert fold.steps == 0
    fold.detach()
    expected = torch.autograd.grad(model(x).square().mean(), list(parameters.values()))
    assert all(torch.allclose(found[name], g) for name, g in zip(parameters, expected, strict=True))


def test_tracing_and_export_run_as_they_are():
    model, x = network(), batch()
    fold = backfold.attach(model, **OPTIONS)
    traced = torch.jit.trace(model, x)
    exported = torch.export.export(model, (x,)).module()
    assert fold.steps == 0
    assert torch.allclose(traced(x), model(x)) and torch.allclose(exported(x), model(x))
    assert fold.steps == 2


def test_calls_on_another_thread_meanwhile_are_told():
    model, x = network(), batch()
    fold = backfold.attach(model, **OPTIONS)
    found = []

    def meanwhile(module, args):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            handle.remove()
            other = threading.Thread(target=lambda: loss_of(model, x).backward())
            other.start()
            other.join()
        found.extend(str(one.message) for one in told)

    handle = model.norm.register_forward_pre_hook(meanwhile)
    model(x)
    assert any("on a second thread while another thread" in text for text in found)
    assert fold.steps == 1
    other = threading.Thread(target=lambda: loss_of(model, x).backward())
    other.start()
    other.join()
    assert fold.steps == 2  # one thread after the other


def test_replicas_are_told():
    model, x = network(), batch()
    backfold.attach(model, **OPTIONS)
    replica = model._replicate_for_data_parallel()
    replica._parameters = {}
    for name, module in model.named_children():
        setattr(replica, name, module)
    with pytest.warns(UserWarning, match="in a replica"):
        replica(x)


def test_states_checks_and_inspections_do_not_count_as_steps(device):
    model, x = network(device), batch(device)
    fold = backfold.attach(model, **OPTIONS)
    train(model, lambda x: loss_of(model, x), 2)
    state = fold.state_dict()  # the probe of step 2 is done now, which runs the model again
    assert fold.steps == 2 and state["plan"] is not None
    report = backfold.inspect(lambda: model(x).sum(), model).to_dict()
    fold.detach()
    assert report == backfold.inspect(lambda: model(x).sum(), model).to_dict()
    fold.attach()
    exact = backfold.attach(network(device), bits=None, min_bytes=0)
    rows = exact.check(lambda: loss_of(exact._model, x), repeats=2).rows
    assert rows[-1].error == 0
    rows = fold.check(lambda: loss_of(model, x), repeats=2).rows
    assert rows[-1].error > 0  # plain gradients are plain
    fold.calibrate(lambda: loss_of(model, x).backward())
    assert fold.plan()["sites"]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_makes_the_same_packets(device, step):
    run = network(device)
    fold = backfold.attach(run, **OPTIONS)
    expected = train(run, lambda x: loss_of(run, x), 6)

    first = network(device)
    fold = backfold.attach(first, **OPTIONS)
    train(first, lambda x: loss_of(first, x), step)
    state = fold.state_dict()
    second = network(device)
    second.load_state_dict(first.state_dict())
    resumed = backfold.attach(second, **OPTIONS)
    resumed.load_state_dict(state)
    seeds = iter(range(step, 6))

    def forward(_):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(next(seeds))).to(device)
        return loss_of(second, x)

    assert same(train(second, forward, 6 - step), expected[step:])
    assert resumed.steps == 6
