# SPDX-License-Identifier: Apache-2.0
"""Folded gradients: right on average, exact where only a sign is read; Controller.check."""

import contextlib
from collections.abc import Callable

import backfold
import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")


def sample(*shape: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device)


LAYERS = {
    "linear": (lambda: nn.Linear(48, 40), (130, 48)),
    "conv": (lambda: nn.Conv2d(5, 7, 3, stride=2), (3, 5, 17, 19)),
    "relu": (lambda: nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 8)), (130, 48)),
}


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_the_mean_over_seeds_is_the_plain_gradient(device, name, bits):
    # The mean of n unbiased gradients has 1 / sqrt(n) of the error of one. Rounding to nearest
    # gives the same error each time: a ratio of sqrt(n) = 16.
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model, x = make().to(device), sample(*shape, device=device)
    parameters = list(model.parameters())
    slope = sample(*model(x).shape, device=device)

    def gradient(fold) -> torch.Tensor:
        with fold:
            loss = (model(x * 2) * slope).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]).double()

    plain, n = gradient(contextlib.nullcontext()), 256
    errors = torch.stack(
        [
            gradient(backfold.Controller(model, bits=bits, min_bytes=0, seed=seed)) - plain
            for seed in range(n)
        ]
    )
    one = errors.square().sum(1).mean().sqrt()
    assert one > 0  # something was rounded
    ratio = (errors.mean(0).norm() / one * n**0.5).item()
    assert 0.5 < ratio < 1.5


@pytest.mark.parametrize("bits", [2, 4, 8, None])
def test_the_mask_of_a_relu_is_exact_beside_a_lossy_reader(device, bits):
    # The gradient of h reads the weight and the sign of relu(h), and nothing that was rounded. A
    # plainly quantized result loses about a tenth of the signs at 4 bits.
    h0, w = sample(64, 256, device=device), sample(256, 32, device=device).requires_grad_()
    h0[0, :4] = torch.tensor([0.0, -0.0, 1e-30, float("nan")])
    h0[1] *= 1e4  # small values beside large ones
    slope = sample(64, 32, device=device)
    slope[0] = 0.5

    def gradient(fold) -> torch.Tensor:
        h = h0.clone().requires_grad_()
        with fold:
            out = ((h * 1).relu() @ w * slope).nansum()
        return torch.autograd.grad(out, h)[0]

    fold = backfold.Controller(bits=bits, min_bytes=0, derive=False)
    expected = gradient(contextlib.nullcontext())
    for _ in range(3):
        found = gradient(fold)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    kinds = {s["kind"] for s in fold.report().to_dict()["sites"] if "relu" in s["op"]}
    assert bits is None or kinds == {"zero-exact"}


def test_a_lone_relu_takes_one_bit(device):
    x = sample(64, 256, device=device).requires_grad_()
    fold = backfold.Controller(bits=4, min_bytes=0)
    for _ in range(3):
        with fold:
            out = ((x * 1).relu() + 1).sum()
        (found,) = torch.autograd.grad(out, x)
        assert torch.equal(found, (x > 0).float())
    assert fold.report().to_dict()["held_bytes"] == x.numel() // 8


# Backward runs such an operation inside the node that puts the view back into its base.
ON_VIEWS = {
    "relu": functional.relu_,
    "hardtanh": functional.hardtanh_,
    "leaky_relu": lambda x: functional.leaky_relu_(x, 0.1),
    "threshold": lambda x: functional.threshold_(x, 0.2, 0.0),
    "clamp": lambda x: x.clamp_(-0.5, 0.5),
}


@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("function", ON_VIEWS)
def test_a_predicate_in_place_on_a_view_is_exact(device, function, bits):
    x0 = sample(6, 40, 48, device=device)

    def gradient(fold) -> torch.Tensor:
        x = x0.clone().requires_grad_()
        with fold:
            h = x * 1
            ON_VIEWS[function](h[1:4])
            out = (h * 3).sum()
        return torch.autograd.grad(out, x)[0]

    fold = backfold.Controller(bits=bits, min_bytes=0)
    expected = gradient(contextlib.nullcontext())
    for _ in range(3):
        assert torch.equal(gradient(fold), expected)


@pytest.mark.parametrize("bits", [4, None])
def test_a_relu_in_place_follows_a_linear_layer_of_three_dimensions(device, bits):
    model = nn.Sequential(nn.Linear(48, 40), nn.ReLU(inplace=True), nn.Linear(40, 8)).to(device)
    x, fold = sample(6, 20, 48, device=device), backfold.Controller(model, bits=bits, min_bytes=0)
    for _ in range(3):
        with fold:
            loss = model(x).sum()
        loss.backward()  # whose addmm gives a view


PREDICATES = {
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "hardtanh": lambda x: functional.hardtanh(x, -1.1, 0.3),
    "relu6": functional.relu6,
    "threshold": lambda x: functional.threshold(x, 0.1, 20.0),
    "clamp": lambda x: x.clamp(-1.1, 0.3),
    "clamp_inf": lambda x: x.clamp(-torch.inf, 0.3),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp(max=6),
}


@pytest.mark.parametrize("function", PREDICATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_predicates_at_their_bounds(device, function, dtype):
    # Exclusive or inclusive, rounded to the type or not, NaN to one side or the other: what the
    # backward kernel itself does is the reference.
    run = PREDICATES[function]
    bounds = torch.tensor([-1.1, 0.3, 0.1, 0.0, -0.0, 6.0, float("nan"), float("inf")])
    if device == "cpu" and function in ("hardtanh", "relu6"):
        bounds = bounds[~bounds.isnan()]  # torch's kernel decides by their position in memory
    near = torch.cat([bounds.nextafter(bounds + s) for s in (-1, 0, 1)])
    x = torch.cat([near, sample(1000, device="cpu") * 4]).to(device, dtype)
    fold = backfold.Controller(bits=None, min_bytes=0)

    def gradient(fold) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        with fold:
            out = (run(leaf * 1) + 1).sum()
        return torch.autograd.grad(out, leaf)[0]

    expected = gradient(contextlib.nullcontext())
    for _ in range(3):
        torch.testing.assert_close(gradient(fold), expected, rtol=0, atol=0, equal_nan=True)
    assert "predicate" in {site["kind"] for site in fold.report().to_dict()["sites"]}


def classifier(device: str) -> tuple[nn.Module, Callable]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    ).to(device)
    x, y = sample(256, 32, device=device), torch.arange(256, device=device) % 10
    return model, lambda: functional.cross_entropy(model(x * 2), y)


def test_check_says_how_far_gradients_are(device):
    model, step = classifier(device)
    for bits, low, high in ((None, 0.0, 0.0), (8, 1e-5, 0.02), (4, 0.005, 0.3), (2, 0.05, 2.0)):
        result = backfold.Controller(model, bits=bits, min_bytes=0).check(step, repeats=8)
        assert [row.module for row in result.rows] == ["0", "1", "4", "all"]
        last = result.rows[-1]
        assert low <= last.error <= high
        assert last.bias <= 0.6 * last.error  # chance alone: 0 to 0.5; rounding to nearest: 1
        assert all(row.module in str(result) for row in result.rows)


def test_check_leaves_model_and_generators_as_they_were(device):
    model, step = classifier(device)
    step().backward()
    before = [p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    backfold.Controller(model, min_bytes=0).check(step, repeats=2)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3,), TypeError, "step must be callable, got int"),
        ((lambda: 3.0,), TypeError, "step must return the loss"),
        ((lambda: torch.ones(3),), TypeError, "step must return the loss"),
        ((lambda: torch.ones(()), 1), ValueError, "repeats must be .*got 1"),
    ],
)
def test_check_wants_a_step_that_returns_the_loss(arguments, error, text):
    model, _ = classifier("cpu")
    with pytest.raises(error, match=text):
        backfold.Controller(model).check(*arguments)


def test_what_lies_between_the_elements_of_a_view_does_not_matter(device):
    # Groups that included the last column, which nothing reads, would round the others to steps of
    # 1e30.
    wide = torch.randn(64, 129, device=device)
    wide[:, -1] = 1e30
    w = torch.randn(64, 128, device=device, requires_grad=True)
    with backfold.Controller(bits=8, min_bytes=0):
        out = ((wide * 1)[:, :-1] * w).sum()
    (found,) = torch.autograd.grad(out, w)
    assert (found - wide[:, :-1]).norm() / wide[:, :-1].norm() < 0.02
