# SPDX-License-Identifier: Apache-2.0
"""What the tests of derivation share: gradients with and without it, and what was derived."""

import contextlib
from collections.abc import Callable

import backfold
import torch


def controller(bits=None, model=None, **options) -> backfold.Controller:
    if bits is not None:
        options.setdefault("adaptive", False)
    return backfold.Controller(model, bits=bits, min_bytes=options.pop("min_bytes", 0), **options)


def leaf(*shape: int, device: str = "cpu", seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()


def gradients(
    forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], fold=None
) -> list[torch.Tensor | None]:
    """Of the mean square of what `forward` makes, with random numbers that are always the same."""
    torch.manual_seed(3)
    with fold or contextlib.nullcontext():
        loss = forward().square().mean()
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


def sites(fold: backfold.Controller, **values) -> list[dict]:
    return [
        site
        for site in fold.report().to_dict()["sites"]
        if all(site[name] == value for name, value in values.items())
    ]


def derived(fold: backfold.Controller) -> list[str]:
    """The places of the last step whose tensors are made again."""
    return [f"{site['op']} {site['slot']}" for site in sites(fold, kind="derived")]


def held(fold: backfold.Controller) -> int:
    return fold.report().to_dict()["held_bytes"]


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """NaN for NaN and -0 for -0."""
    if a is None or b is None:
        return a is b
    if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
        return False
    a, b = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def assert_same_bits(found, expected) -> None:
    assert any(gradient is not None for gradient in expected)
    wrong = [i for i, pair in enumerate(zip(found, expected, strict=True)) if not same_bits(*pair)]
    assert not wrong, f"gradients {wrong} of {len(found)} differ"


def assert_exact(forward, leaves, *, saves: str = "", fold=None) -> backfold.Controller:
    """Gradients have the bits of plain ones, and something was derived, `saves` among it."""
    fold = fold or controller()
    expected = gradients(forward, leaves)
    assert_same_bits(gradients(forward, leaves, fold), expected)
    made = derived(fold)
    assert made and any(saves in place for place in made), f"{saves!r} is not among {made}"
    return fold


def relative_error(found, expected) -> float:
    pairs = [pair for pair in zip(found, expected, strict=True) if pair[1] is not None]
    difference = sum((a - b).double().square().sum() for a, b in pairs)
    return (difference / sum(b.double().square().sum() for _, b in pairs)).sqrt().item()
