# SPDX-License-Identifier: Apache-2.0
"""Graphs of torch.compile in programs of all kinds."""

import contextlib

import backfold
import pytest
import torch
from test_compile import (
    Block,
    equal,
    error,
    folding,
    fresh_compiler,  # noqa: F401
    gradients,
    graph_rows,
    made,
)
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


def by_aot(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


def whole(model: nn.Module):
    """A graph with the loss in it, so that nothing is left to fold outside of it."""
    return by_aot(lambda x: model(x).square().mean(), fullgraph=True)


def test_graphs_around_a_break_and_what_is_not_compiled_are_folded():
    model, x = made("perceptron")
    plain = gradients(model, model, x)

    @torch.compiler.disable
    def middle(x: torch.Tensor) -> torch.Tensor:
        return model[4](model[3](x))

    compiled = by_aot(lambda x: model[5](middle(model[2](model[1](model[0](x))))))
    fold = folding(model)
    found = gradients(model, compiled, x, fold)
    assert 1e-3 < error(found, plain) < 0.3
    rows = fold.report().to_dict()["sites"]
    assert any(row["op"] == "aten::gelu" and row["kind"] == "lossy" for row in rows)
    assert equal(gradients(model, compiled, x, folding(model, None)), gradients(model, compiled, x))


def test_what_passes_from_graph_to_graph_is_folded():
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    x = torch.randn(5, 16, 32, generator=torch.Generator().manual_seed(1))
    plain = gradients(model, model, x)
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    compiled = gradients(model, model, x)
    assert equal(gradients(model, model, x, folding(model, None)), compiled)
    fold = folding(model)
    assert 1e-3 < error(gradients(model, model, x, fold), plain) < 0.3
    report = fold.report().to_dict()
    # What blocks two and three are given; the first one has the data itself.
    given = [row for row in report["sites"] if row["slot"].startswith("primals")]
    assert [row["kind"] for row in given] == ["lossy"] * 2, given
    assert report["held_bytes"] < 0.3 * report["saved_bytes"]


def test_low_precision_copies_of_parameters_are_not_rounded():
    model, x = made("perceptron")
    compiled = by_aot(model, fullgraph=True)

    def run(fold) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model, compiled, x, fold)

    plain, fold = run(None), folding(model)
    assert 1e-3 < error(run(fold), plain) < 0.3
    weights = {parameter.shape for parameter in model.parameters()}
    for row in graph_rows(fold).values():
        if row["kind"] == "lossy":
            assert row["saved_bytes"] not in {2 * shape.numel() for shape in weights}, row
    assert equal(run(folding(model, None)), plain)


def test_parameters_that_are_arguments_are_not_rounded():
    model, x = made("perceptron")

    def run(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(nn.functional.linear(x, first))
        return nn.functional.linear(hidden, second).square().mean()

    fold = folding(model)
    with fold:
        loss = by_aot(run)(x, model[0].weight, model[3].weight)
    loss.backward()
    rows = graph_rows(fold)
    assert rows
    assert not [name for name in rows if name.startswith("primals")]


def test_forwards_may_come_before_their_backwards():
    model, x = made("perceptron")
    compiled = by_aot(model, fullgraph=True)

    def run(fold) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        losses = []
        for part in (x, 2 * x):
            with fold or contextlib.nullcontext():
                losses.append(compiled(part).square().mean())
        for loss in losses:
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = run(None)
    assert equal(run(folding(model, None)), plain)
    assert 1e-3 < error(run(folding(model)), plain) < 0.3


def test_forwards_without_gradients_save_nothing():
    model, x = made("dropout")
    compiled = by_aot(model, fullgraph=True)
    fold = folding(model)
    with fold, torch.no_grad():
        compiled(x)
    assert fold.steps == 0
    model.eval()
    with fold:
        assert torch.equal(compiled(x), model(x))


def test_checkpointing_inside_a_graph():
    model, x = made("block")
    compiled = by_aot(lambda x: checkpoint(model, x, use_reentrant=False), fullgraph=True)
    plain = gradients(model, compiled, x)
    assert equal(gradients(model, compiled, x, folding(model, None)), plain)
    assert error(gradients(model, compiled, x, folding(model)), plain) < 0.3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_checkpoint_around_a_graph_that_is_compiled_inside_the_block(bits, reentrant, recwarn):
    # Backward runs the graph again outside of the block.
    model, x = made("block")
    x.requires_grad_()
    compiled = by_aot(model, fullgraph=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(compiled, x, use_reentrant=reentrant)

    found = [gradients(model, forward, x, folding(model, bits)) for _ in range(2)]
    plain = gradients(model, forward, x)
    for one in found:
        assert equal(one, plain) if bits is None else error(one, plain) < 0.3
    # torch warns where modules are watched.
    assert not [one for one in recwarn if "global hooks" in str(one.message)]


def test_a_compiled_loss():
    model, x = made("perceptron")
    target = torch.randint(32, x.shape[:2], generator=torch.Generator().manual_seed(2))

    def loss_of(fold, loss_fn) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        with fold or contextlib.nullcontext():
            loss = loss_fn(model(x).flatten(0, 1), target.flatten())
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    compiled = by_aot(nn.functional.cross_entropy, fullgraph=True)
    plain = loss_of(None, compiled)
    assert equal(loss_of(folding(model, None), compiled), plain)
    assert error(loss_of(folding(model), compiled), plain) < 0.3


def test_compiled_autograd():
    model, x = made("perceptron")
    compiled = by_aot(model, fullgraph=True)
    plain = gradients(model, compiled, x)
    fold = folding(model, None)
    for _ in range(2):
        with compiled_autograd._enable(torch.compile(backend="eager")):
            found = gradients(model, compiled, x, fold)
        assert error(found, plain) < 1e-6


def test_a_second_derivative_is_refused_as_without_a_block():
    model, x = made("perceptron")
    compiled = by_aot(model, fullgraph=True)
    x.requires_grad_()
    with folding(model):
        loss = compiled(x).square().mean()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


def test_hooks_of_the_program_inside_the_block_see_the_graph():
    model, x = made("perceptron")
    compiled = whole(model)
    plain = gradients(model, compiled, x)
    seen = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return compiled(x)

    assert equal(gradients(model, forward, x, folding(model)), plain)
    assert seen


def test_kept_modules_are_not_rounded():
    model, x = made("perceptron")
    fold = folding(model, keep=["3"])
    gradients(model, by_aot(model, fullgraph=True), x, fold)
    kept = [row for row in graph_rows(fold).values() if row["reason"] == "named in keep="]
    assert kept
    assert {row["module"] for row in kept} == {"3"}


def test_codecs_of_the_user_leave_graphs_as_they_are_and_say_so():
    model, x = made("perceptron")
    compiled = whole(model)
    plain = gradients(model, compiled, x)
    fold = folding(model, codec={nn.Linear: backfold.codecs.Quantize(8)})
    with pytest.warns(UserWarning, match=r"torch\.compile saves is kept as it is"):
        found = gradients(model, compiled, x, fold)
    assert equal(found, plain)


def assert_left_as_it_is() -> None:
    """A graph is compiled and run as without a block, and a warning says so."""
    model, x = made("perceptron")
    compiled = whole(model)
    plain = gradients(model, compiled, x)
    with pytest.warns(UserWarning, match=r"torch\.compile saves is kept as it is"):
        found = gradients(model, compiled, x, folding(model))
    assert equal(found, plain)


def test_a_torch_without_graph_hooks_leaves_graphs_as_they_are(monkeypatch):
    from backfold import _graph_hooks

    monkeypatch.setattr(_graph_hooks, "_saved_tensor", lambda: None)
    assert_left_as_it_is()


def test_a_graph_that_cannot_be_read_is_left_as_it_is(monkeypatch):
    from backfold import _graph_hooks

    def broken(*_):
        raise AttributeError("meta")

    monkeypatch.setattr(_graph_hooks, "_decide", broken)
    assert_left_as_it_is()


def test_plans_of_other_places_count_graphs_as_they_are():
    # The probe runs the model again without folding, and has to find it as it was.
    model, x = made("perceptron")
    compiled = by_aot(model[3:])
    fold = backfold.Controller(model, bits=4, min_bytes=0, probe_steps=(2,), probe_every=None)
    plain = gradients(model, model, x)
    for _ in range(5):
        found = gradients(model, lambda x: compiled(model[:3](x)), x, fold)
        assert error(found, plain) < 0.3
    rows = fold.report().to_dict()["sites"]
    assert any(row["op"] == "compiled graph" and row["kind"] == "lossy" for row in rows)
    state = fold.state_dict()
    other = backfold.Controller(model, bits=4, min_bytes=0)
    other.load_state_dict(state)
    assert 1e-3 < error(gradients(model, whole(model), x, other), plain) < 0.3


@pytest.mark.parametrize(("name", "times"), [("perceptron", 2), ("block", 1)])
def test_inductor(name, times):
    model, x = made(name)
    compiled = torch.compile(model, fullgraph=True)
    plain = gradients(model, compiled, x)
    for _ in range(times):
        assert equal(gradients(model, compiled, x, folding(model, None)), plain)
        fold = folding(model)
        assert 1e-3 < error(gradients(model, compiled, x, fold), plain) < 0.3
        rows = graph_rows(fold).values()
        assert sum(row["held_bytes"] for row in rows) < 0.3 * sum(
            row["saved_bytes"] for row in rows
        )
        assert equal(gradients(model, compiled, x), plain)
        torch.compiler.reset()  # the second time, graphs come from torch's caches
