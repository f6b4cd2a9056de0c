# SPDX-License-Identifier: Apache-2.0
"""Copies that are wider or longer than their source: the source is packed instead."""

import backfold
import pytest
import torch
from torch.nn import functional


def handwritten_gelu(x: torch.Tensor) -> torch.Tensor:
    """GPT-2's: the cube is taken in fp32, the rest uses x itself."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x.float().pow(3))))


def repeated_heads(k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Grouped queries: four heads read one."""
    k = k.unflatten(1, (2, 1, 32)).transpose(1, 2)
    k = k.expand(k.shape[0], 4, 2, 32).reshape(-1, 64)
    return (k @ w).square()


def gradients(loss, leaves, fold=None, after=None) -> list[torch.Tensor]:
    if fold is None:
        out = loss()
    else:
        with fold:
            out = loss()
    if after is not None:
        after()
    return [g.clone() for g in torch.autograd.grad(out, leaves)]


def distance(found, expected) -> float:
    error = sum((a - b).double().square().sum() for a, b in zip(found, expected, strict=True))
    return float((error / sum(b.double().square().sum() for b in expected)).sqrt())


def test_a_gelu_by_hand_has_one_packet(device):
    torch.manual_seed(0)
    h, w0, w1 = (
        torch.randn(size, device=device).mul_(0.2).requires_grad_()
        for size in ((256, 64), (64, 256), (256, 64))
    )

    def loss():
        return (handwritten_gelu((h @ w0).bfloat16()).float() @ w1).square().mean()

    expected = gradients(loss, [h, w0, w1])
    held = {}
    for derive in (True, False):
        fold = backfold.Controller(bits=4, min_bytes=0, adaptive=False, derive=derive)
        assert distance(gradients(loss, [h, w0, w1], fold), expected) < 0.1
        held[derive] = fold.report().to_dict()
    assert held[True]["held_bytes"] < 0.3 * held[False]["held_bytes"]
    kinds = {(row["op"], row["kind"]) for row in held[True]["sites"] if row["op"] != "aten::mm"}
    assert ("aten::pow", "lossy") in kinds and ("aten::tanh", "derived") in kinds


def test_repeated_heads_are_packed_once(device):
    torch.manual_seed(0)
    h, w0, w = (
        torch.randn(size, device=device).requires_grad_() for size in ((256, 64), (64, 64), (64, 8))
    )

    def loss():
        k = h @ w0
        return repeated_heads(k, w).mean() + k.sum()  # somebody has k while it is saved

    expected = gradients(loss, [h, w0, w])
    fold = backfold.Controller(bits=8, min_bytes=0, adaptive=False)
    assert distance(gradients(loss, [h, w0, w], fold), expected) < 0.02
    (row,) = (
        row
        for row in fold.report().to_dict()["sites"]
        if row["op"] == "aten::mm" and row["saved_bytes"] == 4 * 256 * 64 * 4
    )
    assert row["kind"] == "lossy" and row["held_bytes"] < 256 * 64 * 1.2


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_source_that_changes(device, inside, bits):
    torch.manual_seed(0)
    h, w = (torch.randn(64, 64, device=device).requires_grad_() for _ in range(2))
    kept: list[torch.Tensor] = []

    def loss():
        x = (h @ w).bfloat16()
        wide = x.float()
        out = functional.softplus(wide).square().mean()  # reads wide, not x
        if inside:
            x.data.add_(1)
        kept.append(x)
        return out

    def overwrite():
        with torch.no_grad():
            kept.pop().add_(1)

    expected = gradients(loss, [h, w])
    kept.clear()
    fold = backfold.Controller(bits=bits, min_bytes=0, adaptive=False)
    try:
        found = gradients(loss, [h, w], fold, None if inside else overwrite)
    except RuntimeError as error:
        assert not inside and bits is None
        assert "modified in place before backward" in str(error)
        return
    assert distance(found, expected) <= (0 if bits is None else 0.1)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_norm_of_a_copy_has_a_packet_that_keeps_its_rows(device, bits):
    """A product packs the source first, in groups that mix rows of different size."""
    torch.manual_seed(0)
    h = torch.randn(64, 64, device=device)
    h[::2] *= 1e-3
    h.requires_grad_()
    w, v = (torch.randn(64, 64, device=device).requires_grad_() for _ in range(2))

    def loss():
        x = (h * 1.5 @ torch.eye(64, device=device)).bfloat16()
        wide = x.float()
        product = (wide @ w).square().mean()
        normal = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-12).rsqrt()
        return product + (normal @ v).square().mean() + 0 * x.sum()

    expected = gradients(loss, [h, w, v])
    fold = backfold.Controller(bits=bits, min_bytes=0, adaptive=False)
    assert distance(gradients(loss, [h, w, v], fold), expected) < (0.5 if bits == 4 else 0.04)
