# SPDX-License-Identifier: Apache-2.0
"""Plans: what a user asks for, what is held, files and resumed runs."""

import json

import backfold
import pytest
import torch
from test_probe import mixed
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")


def train(fold, model, x, y, steps):
    """Gradients of the last step."""
    for _ in range(steps):
        model.zero_grad()
        with fold:
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
    return [p.grad for p in model.parameters()]


def lossy_bits(fold) -> tuple[float, float]:
    """Mean width of codes, and bytes held."""
    report = fold.report().to_dict()
    elements = {site["name"]: site["elements"] for site in fold.state_dict()["sites"]}
    plan = fold.plan()["sites"]
    bits = sum(site["bits"] * elements[name] for name, site in plan.items())
    return bits / sum(elements[name] for name in plan), report["held_bytes"]


@pytest.mark.parametrize("bits", [2, 2.5, 3.5, 6])
def test_bits_is_the_mean_width(device, bits):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, bits=bits, min_bytes=0)
    train(fold, model, x, y, 4)
    mean, _ = lossy_bits(fold)
    assert bits - 0.1 < mean <= bits
    assert len({site["bits"] for site in fold.plan()["sites"].values()}) > 2
    assert fold.report().to_dict()["plan"]["mean_bits"] == pytest.approx(mean)


def test_one_width_everywhere_where_it_is_not_adaptive(device):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, bits=2, adaptive=False, min_bytes=0)
    train(fold, model, x, y, 4)
    lossy = [s for s in fold.report().to_dict()["sites"] if s["kind"] in ("lossy", "zero-exact")]
    assert {site["bits"] for site in lossy} == {2, 6}  # 6: the floor of log_softmax
    assert not fold.plan()["sites"]


@pytest.mark.parametrize("ratio", [4, 8, 12])
def test_ratio_is_met(device, ratio):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, ratio=ratio, min_bytes=0)
    train(fold, model, x, y, 5)
    report = fold.report().to_dict()
    found = (report["unique_bytes"] - report["alive_bytes"]) / report["held_bytes"]
    assert ratio <= found < 1.05 * ratio
    assert report["plan"]["held_bytes"] == pytest.approx(report["held_bytes"], rel=0.02)


@pytest.mark.parametrize("bits", [1.8, 3, 5])
def test_a_budget_is_kept_and_used(device, bits):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, bits=bits, min_bytes=0)
    train(fold, model, x, y, 4)
    budget = int(lossy_bits(fold)[1] * 1.01)
    fold = backfold.Controller(model, budget=budget, min_bytes=0)
    for step in range(5):
        train(fold, model, x, y, 1)
        held = fold.report().to_dict()["held_bytes"]
        if step >= 2:  # sizes and what is alive anyway are known
            assert held <= budget
    assert held > 0.97 * budget
    assert fold.report().to_dict()["plan"]["held_bytes"] == pytest.approx(held, rel=0.02)


def test_a_budget_holds_for_the_largest_step(device):
    model, x, y = mixed(device)
    budget = 250_000
    fold = backfold.Controller(model, budget=budget, min_bytes=0)
    train(fold, model, x[:16], y[:16], 4)
    held = fold.report().to_dict()["held_bytes"]
    assert 0.95 * budget < held <= budget
    train(fold, model, x, y, 2)  # the first of these teaches
    assert 0.9 * budget < fold.report().to_dict()["held_bytes"] <= budget
    train(fold, model, x[:16], y[:16], 1)
    assert fold.report().to_dict()["held_bytes"] < 0.6 * budget


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"budget": 4000}, r"budget=4000 bytes cannot be met: the lowest possible is \d+ bytes"),
        ({"ratio": 40}, r"ratio=40 cannot be reached: the highest possible is \d+\.\d+"),
    ],
)
def test_what_cannot_be_reached_is_said_with_what_can(device, arguments, text):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, min_bytes=0, **arguments)
    with pytest.raises(ValueError, match=text):
        train(fold, model, x, y, 3)


@pytest.mark.usefixtures("deterministic")
def test_a_resumed_run_makes_the_packets_of_one_that_went_on(device):
    found = []
    for resumed in (False, True):
        model, x, y = mixed(device)
        torch.manual_seed(2)
        options = {"bits": 2.5, "min_bytes": 0, "seed": 7, "probe_steps": (2, 6)}
        fold = backfold.Controller(model, **options)
        train(fold, model, x, y, 4)
        if resumed:
            state = json.loads(json.dumps(fold.state_dict()))
            fold = backfold.Controller(model, **{**options, "seed": 0})
            fold.load_state_dict(state)
        gradients = train(fold, model, x, y, 5)
        found.append((fold.steps, fold.plan(), [g.clone() for g in gradients]))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


def test_a_state_of_another_model_is_refused(device):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, bits=3, min_bytes=0)
    train(fold, model, x, y, 3)
    other = backfold.Controller(torch.nn.Linear(4, 4, device=device), bits=3)
    before = other.state_dict()
    with pytest.raises(ValueError, match=r'the site ".*" belongs to another model'):
        other.load_state_dict(fold.state_dict())
    assert other.state_dict() == before
    with pytest.raises(TypeError, match="state must be a dict"):
        other.load_state_dict([])


def test_a_plan_can_be_saved_edited_and_given(device, tmp_path):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, bits=3, min_bytes=0)
    train(fold, model, x, y, 4)
    path = tmp_path / "plan.json"
    fold.save_plan(path)
    plan = json.loads(path.read_text())
    name = next(name for name in plan["sites"] if "silu" in name)
    plan["sites"][name]["bits"] = "raw"
    path.write_text(json.dumps(plan))
    given = backfold.Controller(model, plan=path, min_bytes=0)
    train(given, model, x, y, 3)
    rows = {row["op"]: row for row in given.report().to_dict()["sites"]}
    assert rows["aten::silu"]["kind"] == "raw"
    found = given.plan()["sites"]
    assert {key: site["bits"] for key, site in found.items()} == {
        key: site["bits"] for key, site in plan["sites"].items()
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: plan["sites"]["x"].update(bits=7), "bits of .* got 7"),
        (lambda plan: plan["sites"]["x"].update(layout="round"), "layout of .* got round"),
        (lambda plan: plan["sites"]["x"].pop("layout"), "'bits' and 'layout'"),
        (
            lambda plan: plan["sites"].update({"no.weight/aten::mm/self/0": plan["sites"]["x"]}),
            "belongs to another model",
        ),
        (lambda plan: plan.pop("sites"), "'sites'"),
    ],
)
def test_a_plan_that_is_none_is_refused(device, change, text):
    model, x, y = mixed(device)
    fold = backfold.Controller(model, bits=3, min_bytes=0)
    train(fold, model, x, y, 3)
    plan = fold.plan()
    name = next(iter(plan["sites"]))
    plan["sites"] = {**plan["sites"], "x": dict(plan["sites"][name])}
    change(plan)
    if "sites" in plan:
        plan["sites"] = {name if key == "x" else key: site for key, site in plan["sites"].items()}
    with pytest.raises(ValueError, match=text):
        backfold.Controller(model, plan=plan)


def test_gacts_poster_example(device):
    model, x, y = mixed(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller = backfold.controller(model, opt_level="L2")
    controller.install_hook()
    for _ in range(5):

        def fwdbwdprop():
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()

        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        controller.iterate(fwdbwdprop)
    controller.uninstall_hook()
    plan = controller.fold.report().to_dict()["plan"]
    assert plan["step"] == 2 and plan["mean_bits"] <= 4
    assert plan["error"] < plan["uniform_error"]


def noisy(device, bits, steps):
    """A run with a different batch each step: the ratios that the guard saw."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()
    ).to(device)
    seen = []
    fold = backfold.Controller(
        model, bits=bits, min_bytes=0, probe_steps=(2,), on_noise=seen.append, probe_every=None
    )
    for _ in range(steps):
        x = torch.randn(256, 64, device=device)
        model.zero_grad()
        with fold:
            loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
    return fold, seen


def test_the_guard_weighs_the_error_against_the_gradients_variance(device):
    fold, seen = noisy(device, 8, 202)
    assert len(seen) == 2 and 0 < seen[-1] < 0.1
    assert fold.report().to_dict()["noise"] == seen[-1]


def test_the_guard_warns_with_a_target_that_is_enough(device):
    with pytest.warns(
        UserWarning, match=r"folding adds [\d.]+% to .*; most of it comes from .*bits=\d"
    ):
        _, seen = noisy(device, 1, 101)
    assert seen[-1] > 0.1


def test_a_tensor_that_the_plan_keeps_does_not_keep_what_it_is_a_part_of(device):
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)]).to(device)
    x = torch.randn(16, 128, 64, device=device)

    def loss():
        first = model[0](x)[:, 0]  # 1 of 128 rows is read, twice
        return (model[1](first) * model[2](first).tanh()).square().mean()

    fold = backfold.Controller(model, budget=1 << 20, min_bytes=0, derive=False)
    for _ in range(5):
        with fold:
            result = loss()
        result.backward()
    assert {site["bits"] for site in fold.plan()["sites"].values()} == {"raw"}
    report = fold.report().to_dict()
    assert report["held_bytes"] == report["plan"]["held_bytes"] < 1 << 20
