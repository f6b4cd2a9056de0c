# SPDX-License-Identifier: Apache-2.0
"""Attached models under torch.compile, whichever of the two comes first."""

import backfold
import pytest
import torch
from small_network import batch
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(functional.gelu(self.first(x)))


class Graphs:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        from torch._dynamo.backends.debugging import aot_eager

        self.count, self._backend = 0, aot_eager

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self._backend(*args, **kwargs)


def attach(model: nn.Module) -> backfold.Fold:
    return backfold.attach(model, bits=4, adaptive=False, min_bytes=0)


def attach_then_compile(model, **options):
    fold = attach(model)
    return fold, torch.compile(model, **options)


def compile_then_attach(model, **options):
    compiled = torch.compile(model, **options)
    return attach(model), compiled


def attach_the_compiled(model, **options):
    compiled = torch.compile(model, **options)
    return attach(compiled), compiled


def attach_then_compile_in_place(model, **options):
    fold = attach(model)
    model.compile(**options)
    return fold, model


def compile_in_place_then_attach(model, **options):
    model.compile(**options)
    return attach(model), model


ORDERS = [
    attach_then_compile,
    compile_then_attach,
    attach_the_compiled,
    attach_then_compile_in_place,
    compile_in_place_then_attach,
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # torch's word on global hooks
@pytest.mark.parametrize("order", ORDERS)
def test_graphs_fold_in_any_order(order):
    torch.manual_seed(0)
    model, x, graphs = Network(), batch(), Graphs()
    plain = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    fold, compiled = order(model, backend=graphs, fullgraph=True)
    for _ in range(3):
        found = torch.autograd.grad(compiled(x).square().mean(), list(model.parameters()))
    rows = fold.report().to_dict()["sites"]
    assert fold.steps == 3 and {row["op"] for row in rows} == {"compiled graph"}
    assert any(row["kind"] == "lossy" for row in rows)
    error = sum(float((a - b).square().sum()) for a, b in zip(plain, found, strict=True))
    assert 1e-8 < error / sum(float(a.square().sum()) for a in plain) < 0.1
    assert 1 <= graphs.count <= 3  # the first steps ask for module names, later ones do not
    with torch.no_grad():
        compiled(x)
    assert fold.steps == 3


@pytest.mark.parametrize("order", [attach_then_compile, compile_then_attach])
def test_containers_of_torch_are_compiled_inside_the_block(order):
    model, x, graphs = (
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)),
        batch(),
        Graphs(),
    )
    fold, compiled = order(model, backend=graphs)
    for _ in range(2):
        compiled(x).square().mean().backward()
    assert graphs.count and fold.steps == 2
    assert {row["op"] for row in fold.report().to_dict()["sites"]} == {"compiled graph"}


def test_a_container_whose_graph_must_not_break_says_what_to_do():
    _, compiled = attach_then_compile(
        nn.Sequential(nn.Linear(64, 8)), fullgraph=True, backend=Graphs()
    )
    with pytest.raises(Exception, match=r"attach what torch\.compile returns"):
        compiled(batch())
