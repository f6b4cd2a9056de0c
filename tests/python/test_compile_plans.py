# SPDX-License-Identifier: Apache-2.0
"""Plans for graphs of torch.compile: each tensor has its own width, and graphs stay as they are."""

import backfold
import pytest
import torch
from test_attach_compile import Graphs
from test_compile import (
    Block,
    equal,
    error,
    fresh_compiler,  # noqa: F401
    gradients,
    graph_rows,
    made,
)
from torch import nn

STEPS = 8  # that errors are averaged over

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def planning(model: nn.Module, **options) -> backfold.Controller:
    options = {"probe_steps": (2,), "probe_every": None, "min_bytes": 0, **options}
    return backfold.Controller(model, **options)


def network(device: str = "cpu") -> tuple[nn.Module, torch.Tensor]:
    """Blocks whose parts matter in different degrees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), Block(), Block(), nn.Linear(32, 8))
    with torch.no_grad():
        model[2].down.weight.mul_(8)
    x = torch.randn(6, 32, 24, generator=torch.Generator().manual_seed(1))
    return model.to(device), x.to(device)


def mean_error(model, forward, x, fold, plain) -> float:
    errors = [error(gradients(model, forward, x, fold), plain) ** 2 for _ in range(STEPS)]
    return (sum(errors) / STEPS) ** 0.5


def held(fold: backfold.Controller) -> int:
    return sum(row["held_bytes"] for row in graph_rows(fold).values())


@pytest.mark.parametrize("bits", [4, 3])
def test_a_plan_has_less_error_than_one_width_of_the_same_bytes(bits, device):
    model, x = network(device)
    plain = gradients(model, model, x)
    graphs = Graphs()
    compiled = torch.compile(lambda x: model(x).square().mean(), backend=graphs, fullgraph=True)
    uniform = backfold.Controller(model, bits=bits, adaptive=False, min_bytes=0)
    at_one_width = mean_error(model, compiled, x, uniform, plain)
    fold = planning(model, budget=uniform.report().to_dict()["held_bytes"])
    for _ in range(3):
        gradients(model, compiled, x, fold)
    count = graphs.count
    planned = mean_error(model, compiled, x, fold, plain)
    assert graphs.count == count  # a plan takes no new graph
    assert len({row["bits"] for row in graph_rows(fold).values() if row["bits"] > 1}) > 2
    assert held(fold) <= held(uniform)
    assert planned < 0.8 * at_one_width  # a table of noise scores 1 and more


def test_tables_tell_the_error_that_a_tensor_brings(device):
    model, x = network(device)
    compiled = torch.compile(
        lambda x: model(x).square().mean(), backend="aot_eager", fullgraph=True
    )
    plain = gradients(model, compiled, x)
    fold = planning(model, bits=4)
    for _ in range(3):
        gradients(model, compiled, x, fold)
    plan = fold.plan()
    sites = plan["sites"]
    assert len(sites) > 20
    assert {row["estimate"] for row in sites.values()} == {"derivative"}
    energies = [(float(gradient.double().square().sum()), gradient.numel()) for gradient in plain]
    weights = backfold._C.LeafWeights().of(energies)
    ratios = {}
    for name in list(sites)[::3]:
        alone = {
            one: {**row, "bits": row["bits"] if one == name else "raw"}
            for one, row in sites.items()
        }
        fixed = backfold.Controller(model, bits=4, plan={**plan, "sites": alone}, min_bytes=0)
        found = 0.0
        for _ in range(STEPS):
            changes = zip(weights, gradients(model, compiled, x, fixed), plain, strict=True)
            found += sum(w * float((a - b).double().square().sum()) for w, a, b in changes) / STEPS
        ratios[name] = sites[name]["error"] / found
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("target", ["ratio", "budget"])
def test_targets_of_bytes_are_met_by_graphs(target):
    model, x = network()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    probe = planning(model, bits=4)
    gradients(model, compiled, x, probe)
    unique = probe.report().to_dict()["unique_bytes"]
    fold = planning(model, **{target: 4.0 if target == "ratio" else unique // 4})
    for _ in range(4):
        gradients(model, compiled, x, fold)
    assert fold.report().to_dict()["held_bytes"] <= unique / 4


def test_one_graph_that_serves_several_places_has_a_width_in_each():
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    x = torch.randn(5, 16, 32, generator=torch.Generator().manual_seed(1))
    plain = gradients(model, model, x)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    fold = planning(model, bits=4)
    for _ in range(4):
        assert error(gradients(model, model, x, fold), plain) < 0.3
    sites = {name: row for name, row in fold.plan()["sites"].items() if "compiled graph" in name}
    assert {name.rsplit("/", 1)[1] for name in sites} >= {"0", "1"}
    measured = [name for name, row in sites.items() if row["estimate"] == "derivative"]
    assert len(measured) > 0.8 * len(sites)


def test_sizes_may_change():
    model, _ = network()
    compiled = torch.compile(
        lambda x: model(x).square().mean(), backend="aot_eager", dynamic=True, fullgraph=True
    )
    fold = planning(model, bits=4)
    for rows in (6, 6, 6, 9, 4):
        x = torch.randn(rows, 32, 24)
        plain = gradients(model, model, x)
        assert 1e-3 < error(gradients(model, compiled, x, fold), plain) < 0.3
    assert {row["estimate"] for row in fold.plan()["sites"].values()} == {"derivative"}


def test_a_run_that_is_taken_up_again_makes_the_same_packets():
    model, x = network()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fold = planning(model, bits=3)
    for _ in range(3):
        gradients(model, compiled, x, fold)
    state = fold.state_dict()
    expected = gradients(model, compiled, x, fold)
    other = planning(model, bits=3)
    other.load_state_dict(state)
    assert equal(gradients(model, compiled, x, other), expected)


def test_a_measured_step_is_bitwise_an_ordinary_one():
    model, x = made("dropout")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for steps in [(2,), (50,)]:
        fold = planning(model, bits=4, probe_steps=steps)
        found.append([gradients(model, compiled, x, fold) for _ in range(2)])
    assert equal(found[0][1], found[1][1])


def test_a_graph_that_cannot_be_differentiated_keeps_one_width(monkeypatch):
    from backfold import _graph_measured

    def fails(*_):
        raise NotImplementedError("no derivative")

    monkeypatch.setattr(_graph_measured, "_called", fails)
    model, x = network()
    plain = gradients(model, model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fold = planning(model, bits=4)
    for _ in range(2):
        gradients(model, compiled, x, fold)
    with pytest.warns(UserWarning, match="could not be measured.*no derivative"):
        found = gradients(model, compiled, x, fold)
    assert error(found, plain) < 0.3


def test_backward_may_run_twice_and_what_never_runs_backward_is_freed():
    model, x = made("block")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fold = planning(model, bits=4, adaptive=False)
    with fold:
        loss = compiled(x).square().mean()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert equal(first, second)

    def step() -> None:
        with fold:
            compiled(x).square().mean()

    step()
    with torch.profiler.profile(profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    assert sum(event.nbytes() for event in events if event.name() == "[memory]") == 0
