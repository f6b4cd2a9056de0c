# SPDX-License-Identifier: Apache-2.0
"""A failed entry leaves nothing behind; what is not a training step is not taken for one."""

import warnings

import backfold
import pytest
import torch
from small_network import batch, equal, network
from torch import nn
from torch.nn.modules import module as torch_modules

pytestmark = pytest.mark.usefixtures("one_thread")


def hooks_of(model: nn.Module) -> list[int]:
    """The number of hooks of all kinds that an entry sets."""
    own = [*model._forward_hooks, *model._forward_pre_hooks]
    everywhere = [
        *torch_modules._global_forward_hooks,
        *torch_modules._global_forward_pre_hooks,
    ]
    return [len(own), len(everywhere), len(model._forward_hooks_always_called)]


def step(model, fold, x) -> list[torch.Tensor]:
    model.zero_grad()
    with fold:
        loss = model(x * 2).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def disabled():
    return torch.autograd.graph.disable_saved_tensors_hooks("no hooks here")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("before", "late"), [(n, False) for n in range(4)] + [(n, True) for n in (0, 1, 3)]
)
def test_a_block_that_cannot_be_entered_leaves_nothing_behind(device, before, late, monkeypatch):
    if late:  # noticed when the next step is recorded already; what waits would be measured in vain
        monkeypatch.setattr(backfold._C.Controller, "expect_enterable", lambda self: None)
    found = {}
    for fails in (False, True):
        model, x = network(device), batch(device)
        fold = backfold.Controller(model, bits=3.5, min_bytes=0, probe_steps=(2,))
        hooks = hooks_of(model)
        for _ in range(before):
            step(model, fold, x)
        if fails:
            with disabled(), pytest.raises(RuntimeError, match="no hooks here"), fold:
                pass
            assert hooks_of(model) == hooks
            # Nothing is watching: calls outside the block are not recorded.
            inputs = x.clone().requires_grad_()  # leaves the gradients of parameters alone
            torch.autograd.grad(model(inputs).sum(), inputs)
        found[fails] = [step(model, fold, x) for _ in range(4 - before)]
        found[fails, "plan"] = fold.plan()
        assert hooks_of(model) == hooks
        assert fold.steps == 4
    assert found[False, "plan"] == found[True, "plan"]
    for a, b in zip(found[False], found[True], strict=True):
        assert equal(a, b)


def test_a_budget_that_cannot_be_kept_leaves_no_record_of_the_probe_step_behind():
    model, x = network(), batch()
    hooks = hooks_of(model)
    fold = backfold.Controller(model, budget=500, min_bytes=0, probe_steps=(2,))
    step(model, fold, x)
    for _ in range(2):
        with pytest.raises(ValueError, match="budget=500 bytes cannot be met"):
            step(model, fold, x)
        assert hooks_of(model) == hooks
    assert fold.state_dict()["probe"]["again"]
    with backfold.Controller(model, min_bytes=0):  # another controller may use the thread
        model(x)


def test_inspect_that_cannot_begin_leaves_nothing_behind():
    model, x = network(), batch()
    hooks = hooks_of(model)
    with disabled(), pytest.raises(RuntimeError, match="no hooks here"):
        backfold.inspect(lambda: model(x).sum(), model)
    assert hooks_of(model) == hooks
    report = backfold.inspect(lambda: model(x * 2).sum(), model).to_dict()
    assert report["saved_bytes"] > 0
    if not torch.cuda.is_initialized():  # memory of the GPU is counted there
        assert report["unseen_bytes"] >= 0


@pytest.mark.usefixtures("deterministic")
def test_a_block_inside_itself_is_refused_and_the_outer_one_goes_on(device):
    plans = []
    for nested in (False, True):
        model, x = network(device), batch(device)
        fold = backfold.Controller(model, bits=3.5, min_bytes=0, probe_steps=(2,))
        for _ in range(4):
            with fold:
                if nested:
                    with pytest.raises(RuntimeError, match="cannot be inside itself"), fold:
                        pass
                loss = model(x * 2).square().mean()
            loss.backward()
        plans.append(fold.plan())
    assert plans[0]["sites"]
    assert plans[0] == plans[1]


def test_a_warning_that_raises_ends_the_block_all_the_same():
    model, x = network(), batch()
    hooks = hooks_of(model)
    fold = backfold.Controller(
        model, bits=4, codec={"no such place": backfold.codecs.Exact()}, probe_steps=(1,)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no such place"):
            step(model, fold, x)
    assert hooks_of(model) == hooks


def test_blocks_without_gradients_give_back_memory_that_steps_reuse():
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU())
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    x = torch.randn(4096, 64)
    with fold:
        loss = model(x).sum()
    loss.backward()
    assert backfold._C.bytes_kept_for_reuse() > 0
    for _ in range(5):
        with fold, torch.no_grad():
            model(x)
    assert backfold._C.bytes_kept_for_reuse() == 0


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_block_without_gradients_after_any_step_changes_nothing(device, mode):
    found = {}
    for between in (False, True):
        model, x = network(device), batch(device)
        fold = backfold.Controller(model, bits=3.5, min_bytes=0, probe_steps=(2, 4))
        found[between] = []
        for _ in range(6):
            found[between].append(step(model, fold, x))
            if between:
                with warnings.catch_warnings(), mode(), fold:
                    warnings.simplefilter("error")
                    model(x)
        found[between, "plan"] = fold.plan()
        assert fold.steps == 6
    assert found[False, "plan"] == found[True, "plan"]
    for a, b in zip(found[False], found[True], strict=True):
        assert equal(a, b)


def test_a_state_that_is_asked_for_in_inference_mode_has_the_plan():
    model, x = network(), batch()
    fold = backfold.Controller(model, bits=3.5, min_bytes=0, probe_steps=(2,))
    for _ in range(2):
        step(model, fold, x)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error")
        assert fold.state_dict()["plan"] is not None
    assert {site["estimate"] for site in fold.plan()["sites"].values()} != {"signal gain"}


def test_check_does_not_feed_the_guard(device):
    model, x = network(device), batch(device)
    fold = backfold.Controller(model, bits=3.5, min_bytes=0, probe_steps=(2,))
    for _ in range(5):
        step(model, fold, x)
    before = fold.state_dict()["guard"]
    fold.check(lambda: model(3 * x).square().mean(), 4)
    assert fold.state_dict()["guard"] == before
    step(model, fold, x)
    step(model, fold, x)
    assert fold.state_dict()["guard"] != before
