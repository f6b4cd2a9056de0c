# SPDX-License-Identifier: Apache-2.0
"""Graphs of torch.compile: what they save is folded inside of them."""

import contextlib

import backfold
import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """A block of a transformer, with fused attention."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gated(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def perceptron(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Linear(32, 96), nn.ReLU(), nn.Dropout(dropout), nn.Linear(96, 96), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(96, 32))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


MODELS = {
    "perceptron": (perceptron, (7, 9, 32)),
    "dropout": (lambda: perceptron(0.2), (7, 9, 32)),
    "block": (Block, (3, 11, 32)),
    "gated": (Gated, (3, 11, 32)),
    "convolutional": (convolutional, (2, 3, 14, 14)),
}


def made(name: str, device: str = "cpu") -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return build().to(device), x.to(device)


def folding(model: nn.Module, bits: int | None = 4, **options) -> backfold.Controller:
    return backfold.Controller(model, bits=bits, adaptive=False, min_bytes=0, **options)


def gradients(model, forward, x, fold=None) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    with fold or contextlib.nullcontext():
        loss = forward(x)
        loss = loss.square().mean() if loss.dim() else loss
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    difference = sum((a - b).double().square().sum() for a, b in zip(found, expected, strict=True))
    return float((difference / sum(b.double().square().sum() for b in expected)).sqrt())


def graph_rows(fold: backfold.Controller) -> dict[str, dict]:
    rows = fold.report().to_dict()["sites"]
    return {row["slot"]: row for row in rows if row["op"] == "compiled graph"}


@pytest.mark.parametrize("name", MODELS)
def test_exact_folding_is_bitwise_that_of_the_plain_graph(name, device, deterministic, recwarn):
    model, x = made(name, device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = gradients(model, compiled, x)
    model, x = made(name, device)  # batch norms have moved on
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fold = folding(model, bits=None)
    assert equal(gradients(model, compiled, x, fold), plain)
    assert {row["kind"] for row in graph_rows(fold).values()} <= {"raw", "bits"}
    assert not [one for one in recwarn if "backfold" in str(one.message)]


@pytest.mark.parametrize("name", ["perceptron", "block", "gated", "convolutional"])
def test_rounded_gradients_are_near_those_of_eager_training(name, device):
    model, x = made(name, device)
    plain = gradients(model, model, x)
    model, x = made(name, device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fold = folding(model)
    found = gradients(model, compiled, x, fold)
    assert 1e-3 < error(found, plain) < 0.3  # gradients of other tensors score at least 1
    rows = graph_rows(fold)
    packed = [row for row in rows.values() if row["kind"] in ("lossy", "zero-exact", "bits")]
    assert sum(row["held_bytes"] for row in packed) < 0.25 * sum(
        row["saved_bytes"] for row in packed
    )
    assert sum(row["saved_bytes"] for row in packed) > 0.5 * sum(
        row["saved_bytes"] for row in rows.values()
    )


def test_rounding_is_unbiased_over_steps():
    model, x = made("perceptron")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = gradients(model, compiled, x)
    fold = folding(model, bits=2)
    steps = [gradients(model, compiled, x, fold) for _ in range(64)]
    single = sum(error(one, plain) for one in steps) / len(steps)
    mean = [torch.stack(parts).mean(0) for parts in zip(*steps, strict=True)]
    # 1/8 of independent noise is left, and 2% of GELU's curvature; the same rounding in every step,
    # or rounding to nearest, would score 1.
    assert error(mean, plain) < 0.3 * single


def test_one_seed_gives_the_same_bytes_and_leaves_torch_s_generator_alone():
    model, x = made("perceptron")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def two_steps(seed: int) -> list[list[torch.Tensor]]:
        fold = folding(model, seed=seed)
        found = [gradients(model, compiled, x, fold) for _ in range(2)]
        state = torch.get_rng_state()
        torch.manual_seed(3)
        assert torch.equal(torch.get_rng_state(), state)
        return found

    first, again, other = two_steps(5), two_steps(5), two_steps(6)
    assert equal(first[0], again[0])
    assert equal(first[1], again[1])
    assert not equal(first[0], first[1])
    assert not equal(first[0], other[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_nothing_keeps_what_was_folded_alive(backend, device):
    model, x = made("perceptron", device)

    def saved_bytes(fold) -> int:
        compiled = torch.compile(lambda x: model(x).square().mean(), backend=backend)
        with fold:
            loss = compiled(x)
        inputs = {one.untyped_storage().data_ptr() for one in [x, *model.parameters()]}
        return sum(
            tensor.nbytes
            for tensor in loss.grad_fn.saved_tensors
            if tensor.untyped_storage().data_ptr() not in inputs
        )

    plain = saved_bytes(contextlib.nullcontext())
    fold = folding(model)
    tickets = saved_bytes(fold)  # and what is kept as it is
    rows = graph_rows(fold).values()
    raw = sum(row["held_bytes"] for row in rows if row["kind"] == "raw")
    assert tickets <= raw + 16 * len(rows)
    assert sum(row["held_bytes"] for row in rows) < 0.25 * plain
    assert sum(row["saved_bytes"] for row in rows) == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize("first", ["inside", "outside"])
def test_a_model_compiled_on_one_side_of_the_block_runs_on_the_other(first):
    model, x = made("perceptron")
    plain = gradients(model, model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fold = folding(model)
    for _ in range(2):
        if first == "inside":
            gradients(model, compiled, x, fold)
        outside = gradients(model, compiled, x)
        assert error(outside, plain) < 1e-5  # a graph that folds would score 0.05
        inside = gradients(model, compiled, x, fold)
        assert 1e-3 < error(inside, plain) < 0.3
        assert graph_rows(fold)


def test_each_controller_has_its_own_width():
    model, x = made("perceptron")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = gradients(model, compiled, x)
    errors = {}
    for _ in range(2):
        for bits in (2, 8):
            fold = folding(model, bits=bits)
            errors[bits] = error(gradients(model, compiled, x, fold), plain)
            assert {row["bits"] for row in graph_rows(fold).values()} <= {1, bits}
    assert errors[2] > 20 * errors[8]


def test_sizes_may_change():
    model, x = made("gated")
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    fold = folding(model)
    for rows in (4, 9, 5):
        x = torch.randn(rows, 11, 32)
        plain = gradients(model, model, x)
        assert 1e-3 < error(gradients(model, compiled, x, fold), plain) < 0.3
        saved = {row["saved_bytes"] for row in graph_rows(fold).values()}
        assert rows * 11 * 96 * 4 in saved


def test_what_backward_reads_finely_has_more_bits_or_stays_exact():
    model, x = made("block")
    fold = folding(model, bits=2)
    gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True), x, fold)
    rows = graph_rows(fold)
    # Query and key; the rows of norms, of 32 values, share groups of 128.
    assert sorted(row["bits"] for row in rows.values() if row["bits"] > 2) == [6, 6, 8]
    exact = [row for row in rows.values() if row["kind"] == "raw"]
    # Mean and deviation of two norms, and the log-sum-exp of attention.
    assert len(exact) == 5
    assert all("statistic" in row["reason"] for row in exact)


def test_a_graph_that_folds_does_not_run_outside_of_a_block():
    how = (0, False, False, 0, "", "")
    with pytest.raises(RuntimeError, match="outside of"):
        torch.ops.backfold.fold(torch.ones(4, 64), [64, 1], *how)
    with folding(nn.Linear(1, 1)):
        ticket = torch.ops.backfold.fold(torch.ones(64, 4).t(), [64, 1], *how)
    asked = ([4, 64], [64, 1], torch.float32)
    assert torch.equal(torch.ops.backfold.unfold(ticket, *asked), torch.ones(4, 64))
    with pytest.raises(RuntimeError, match="a copy of it"):
        torch.ops.backfold.unfold(ticket.clone(), *asked)
    with pytest.raises(RuntimeError, match="is asked for"):
        torch.ops.backfold.unfold(ticket, [64, 4], [4, 1], torch.float32)
