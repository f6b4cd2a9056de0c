# SPDX-License-Identifier: Apache-2.0
"""Logarithms of shares: what log-softmax saves comes back with shares that add up to 1."""

import backfold
import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, CLASSES = 64, 128


def fold(bits: int) -> backfold.Controller:
    return backfold.Controller(nn.Linear(1, 1), bits=bits, adaptive=False, min_bytes=0)


def leaf(device: str, *sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(sizes))
    return (3 * torch.randn(sizes, generator=generator)).to(device).requires_grad_()


def gradient(x, target, scope) -> torch.Tensor:
    with scope:
        loss = functional.cross_entropy(x, target, reduction="sum")
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("sizes", [(ROWS, CLASSES), (8, CLASSES, 3, 4)])
def test_gradients_of_a_row_add_up_to_nothing(device, sizes):
    x = leaf(device, *sizes)
    target = torch.zeros(sizes[:1] + sizes[2:], dtype=torch.long, device=device)
    found = gradient(x, target, fold(6))
    assert not torch.equal(found, gradient(x, target, torch.enable_grad()))
    assert found.sum(1).abs().max() < 1e-4  # shares that are 6 bits' rounding off give 1e-2


def test_errors_of_a_batch_do_not_add_up(device):
    x = leaf(device, 16 * ROWS, CLASSES)
    target = torch.arange(16 * ROWS, device=device) % CLASSES
    plain = gradient(x, target, torch.enable_grad()).sum(0)
    controller = fold(6)
    draws = [gradient(x, target, controller).sum(0) - plain for _ in range(60)]
    first, second = torch.stack(draws).view(2, 30, CLASSES).mean(1)
    bias = (first * second).sum() / plain.square().sum()
    assert bias < 5e-5  # 1e-3 where shares add up to what rounding makes of them


def test_readers_of_the_logarithms_themselves_get_values_without_a_bias(device):
    # They are linear in them: taking the sums away would shift all of a row.
    x, weight = leaf(device, ROWS, CLASSES), leaf(device, ROWS, CLASSES)
    plain = x.log_softmax(1).detach()
    controller = fold(4)
    mean = torch.zeros_like(plain)
    draws = 400
    for _ in range(draws):
        with controller:
            y = (x.log_softmax(1) * weight).sum()
        mean += torch.autograd.grad(y, weight)[0] / draws
    shift = (mean - plain).mean().abs()
    assert shift < 0.005  # half the variance, 0.05, where the sums were taken away
    saved = [site for site in controller.report().to_dict()["sites"] if site["kind"] == "lossy"]
    assert {site["op"] for site in saved} == {"aten::_log_softmax", "aten::mul"}


def test_a_probe_measures_what_comes_back(device):
    torch.manual_seed(5)
    model = nn.Linear(32, CLASSES).to(device)
    x = torch.randn(256, 32, device=device)
    target = torch.randint(CLASSES, (256,), device=device)

    def step(scope) -> torch.Tensor:
        with scope:
            loss = functional.cross_entropy(3 * model(x), target)
        loss.backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
        return found

    plain = step(torch.enable_grad())
    controller = backfold.Controller(model, bits=4, min_bytes=0)
    errors = [(step(controller) - plain).square().sum().item() for _ in range(40)]
    sites = controller.report().to_dict()["sites"]
    expected = sum(site["error"] for site in sites if site.get("error"))
    measured = sum(errors[-20:]) / 20
    assert expected == pytest.approx(measured, rel=0.75)
