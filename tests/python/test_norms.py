# SPDX-License-Identifier: Apache-2.0
"""Inputs of norms: packed as the normalised values that backward reads."""

import backfold
import pytest
import torch
from torch import nn

NORMS = {
    "layer": (lambda: nn.LayerNorm(48, eps=1e-12), (64, 48)),
    "layer of two dimensions": (lambda: nn.LayerNorm((6, 8), eps=1e-12), (64, 6, 8)),
    "rms": (lambda: nn.RMSNorm(48, eps=1e-12), (64, 48)),
    "group": (lambda: nn.GroupNorm(4, 16, eps=1e-12), (16, 16, 5, 3)),
    "instance": (lambda: nn.InstanceNorm2d(16, eps=1e-12, affine=True), (8, 16, 7, 7)),
    "batch": (lambda: nn.BatchNorm2d(32, eps=1e-12), (6, 32, 7, 7)),
    "batch of vectors": (lambda: nn.BatchNorm1d(48, eps=1e-12), (64, 48)),
}


def rows_of_all_sizes(name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Every third row (channel, for batch norm) is a million times smaller than the others."""
    torch.manual_seed(0)
    x = torch.randn(shape, device=device) + 1
    small = torch.ones(shape[1 if name.startswith("batch") else 0], device=device)
    small[::3] = 1e-6
    axis = int(name.startswith("batch"))
    return x * small.view([-1 if i == axis else 1 for i in range(len(shape))])


def gradients(norm: nn.Module, x: torch.Tensor, fold: backfold.Controller | None):
    x = x.clone().requires_grad_()
    norm.zero_grad()
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(x.shape, generator=generator).to(x.device)
    if fold is None:
        loss = (norm(x * 1.0) * weight).sum()
    else:
        with fold:
            loss = (norm(x * 1.0) * weight).sum()
    loss.backward()
    return [x.grad, *(p.grad.clone() for p in norm.parameters())]


def error(found, plain) -> float:
    parts = [(f - p).norm() / p.norm() for f, p in zip(found, plain, strict=True)]
    return float(torch.stack(parts).max())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_rows_lend_each_other_no_noise(name, channels_last, device):
    """Without normalisation, errors are 1e3 times the gradient and more."""
    make, shape = NORMS[name]
    if channels_last and len(shape) != 4:
        channels_last = False
    norm = make().to(device)
    x = rows_of_all_sizes(name, shape, device)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    plain = gradients(norm, x, None)
    for bits, most in ((4, 0.5), (8, 0.04)):
        fold = backfold.Controller(norm, bits=bits, min_bytes=0, adaptive=False)
        assert error(gradients(norm, x, fold), plain) < most


def test_a_row_of_zeros_keeps_its_gradient(device):
    """The class token of a fresh BEiT: rstd is 1e6 there."""
    norm = nn.LayerNorm(64, eps=1e-12).to(device)
    torch.manual_seed(0)
    x = torch.randn(34, 64, device=device)
    x[::17] = 0
    fold = backfold.Controller(norm, bits=4, min_bytes=0, adaptive=False)
    assert error(gradients(norm, x, fold), gradients(norm, x, None)) < 0.3  # 1e5 unnormalised


@pytest.mark.parametrize("shape", [(2, 32, 1, 1), (2, 32, 3, 3)])
def test_a_norm_over_few_values_keeps_its_input(shape, device):
    norm = nn.BatchNorm2d(32).to(device)
    x = torch.randn(shape, device=device)
    fold = backfold.Controller(norm, bits=4, min_bytes=0, adaptive=False, derive=False)
    found = gradients(norm, x, fold)
    for one, other in zip(found, gradients(norm, x, None), strict=True):
        assert torch.equal(one, other)
    reasons = {row["reason"] for row in fold.report().to_dict()["sites"] if row["slot"] == "input"}
    assert reasons == {"a norm over so few values cancels all but noise"}


@pytest.mark.parametrize(("exponent", "by_row"), [(2.0, True), (3.0, False), (4.0, True)])
def test_rows_of_a_power_have_their_own_scale_but_for_a_cube(exponent, by_row, device):
    """A cube is part of GELU, which multiplies no noise: finding the scales took 23 kernels a step
    of GPT-2."""
    norm = nn.Linear(1, 1).to(device)  # anything
    x = rows_of_all_sizes("rows", (64, 48), device).requires_grad_()
    fold = backfold.Controller(norm, bits=8, min_bytes=0, adaptive=False, derive=False)
    with fold:
        loss = (x * 1.0).pow(exponent).sum()
    loss.backward()
    plain = exponent * x.detach().pow(exponent - 1)
    small = (x.grad - plain)[::3].norm() / plain[::3].norm()
    assert (small < 0.1) == by_row


def test_other_readers_are_given_the_same_packet(device):
    norm, linear = nn.LayerNorm(48).to(device), nn.Linear(48, 8).to(device)
    model = nn.ModuleList([norm, linear])
    x = torch.randn(64, 48, device=device, requires_grad=True)
    fold = backfold.Controller(model, bits=8, min_bytes=0, adaptive=False, derive=False)
    with fold:
        h = x * 1.0
        loss = norm(h).square().sum() + linear(h).square().sum()
    del h
    rows = [row for row in fold.report().to_dict()["sites"] if row["slot"] in ("input", "mat1")]
    assert sorted(row["kind"] for row in rows) == ["lossy", "shared"]
    loss.backward()
    found = linear.weight.grad.clone()
    model.zero_grad()
    (norm(x * 1.0).square().sum() + linear(x * 1.0).square().sum()).backward()
    assert (found - linear.weight.grad).norm() / linear.weight.grad.norm() < 0.02


def test_a_norm_that_fails_leaves_nothing_behind(device):
    x = torch.randn(64, 48, device=device, requires_grad=True)
    fold = backfold.Controller(bits=4, min_bytes=0, adaptive=False)
    with fold:
        with pytest.raises(RuntimeError):
            nn.functional.layer_norm(x * 1.0, (48,), torch.ones(3, device=device))
        loss = nn.functional.layer_norm(x * 1.0, (48,)).square().sum()
    loss.backward()
    assert x.grad.isfinite().all()


def test_a_plan_keeps_what_would_drown_the_gradient():
    """The gradient is declared small; such plans once had an error of 1e23 times its energy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(256, 64)

    def step():
        model(x).square().mean().backward()

    fold = backfold.Controller(model, bits=4, min_bytes=0)
    fold.calibrate(step)
    summary = fold.report().to_dict()["plan"]
    assert summary is None or summary["kept"] == []
    table = fold.state_dict()
    table["gradient_energy"] = 1e-3 * table["plan"]["error"]
    fold.load_state_dict(table)
    with pytest.warns(UserWarning, match="would drown the gradient in noise"):
        fold._core.replan()
    state = fold.state_dict()
    assert state["plan"]["kept"]
    assert state["plan"]["error"] <= state["gradient_energy"]
    plan = fold.plan()["sites"]
    assert all(plan[name]["bits"] == "raw" for name in state["plan"]["kept"])
