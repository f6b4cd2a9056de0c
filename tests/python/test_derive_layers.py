# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made again in backward: the layers that models are written in, bits=None."""

import pytest
import torch
from derivation import assert_exact, controller, derived, gradients, held, leaf
from derivation_layers import Attention, Gated, HandWrittenGelu, HandWrittenRmsNorm, Residual
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def words(device: str, dtype=torch.float32, batch: int = 2) -> torch.Tensor:
    return leaf(batch, 24, 32, device=device, dtype=dtype).detach()


def image(device: str, dtype=torch.float32) -> torch.Tensor:
    return leaf(4, 8, 10, 10, device=device, dtype=dtype).detach()


def check(model: nn.Module, x: torch.Tensor, saves: str, cast=None):
    """Exact, derived, and holding less than without; returns the two numbers of bytes."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    leaves = list(model.parameters())

    def forward():
        with torch.autocast(x.device.type, cast or torch.bfloat16, enabled=cast is not None):
            return model(x * 1)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    fold = assert_exact(forward, leaves, saves=saves, fold=controller(model=model))
    other = controller(model=model, derive=False)
    gradients(forward, leaves, other)
    assert held(fold) < held(other)
    for name, value in model.state_dict().items():  # statistics: moved by forwards alone
        if "num_batches" in name:
            assert value == state[name] + 3
    return held(fold), held(other)


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hand_written_gelu(device, dtype, cast):
    layers = [nn.Linear(32, 32), HandWrittenGelu(), nn.Linear(32, 32)]
    model = nn.Sequential(*layers).to(device, dtype)
    less, more = check(model, words(device, dtype), "aten::", cast)
    assert less < 0.5 * more


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_hand_written_rms_norm(device, dtype, cast):
    layers = [nn.Linear(32, 32), HandWrittenRmsNorm(32), nn.Linear(32, 32)]
    model = nn.Sequential(*layers).to(device, dtype)
    check(model, words(device, dtype), "aten::", cast)


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
def test_gated_units(device, cast):
    model = nn.Sequential(nn.Linear(32, 32), Gated(32)).to(device)
    less, more = check(model, words(device), "mm", cast)
    assert less < 0.75 * more


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
def test_softmax_dropout_product(device, cast):
    model = nn.Sequential(nn.Linear(32, 32), Attention(32, 4)).to(device)
    check(model, words(device), "bmm", cast)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
def test_batch_norm_relu_convolution_residual(device, layout, cast):
    body = [nn.Conv2d(8, 8, 3, padding=1), Residual(8), Residual(8), nn.Conv2d(8, 8, 1)]
    model = nn.Sequential(*body).to(device, memory_format=layout)
    check(model, image(device).to(memory_format=layout), "conv", cast)


NORMS = {
    "group": lambda: nn.GroupNorm(2, 8),
    "group, no affine": lambda: nn.GroupNorm(4, 8, affine=False),
    "layer": lambda: nn.LayerNorm([8, 10, 10]),
    "layer, no affine": lambda: nn.LayerNorm([10, 10], elementwise_affine=False),
    "layer, no bias": lambda: nn.LayerNorm(10, bias=False),
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, no affine": lambda: nn.BatchNorm2d(8, affine=False),
    "batch, no statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "batch, cumulative": lambda: nn.BatchNorm2d(8, momentum=None),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "root mean square": lambda: nn.RMSNorm([10, 10]),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_images(device, norm, layout):
    layers = [nn.Conv2d(8, 8, 1), NORMS[norm](), nn.Conv2d(8, 8, 3)]
    model = nn.Sequential(*layers).to(device, memory_format=layout)
    check(model, image(device).to(memory_format=layout), "conv")


class Windows(nn.Module):
    """Pads, rolls, cuts into windows and puts together again, as Swin does."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.merge = nn.Linear(32, 16)

    def forward(self, x):
        h = functional.pad(self.norm(self.first(x.permute(0, 2, 3, 1))), (0, 0, 0, 2, 0, 2))
        h = torch.roll(h, (-2, -2), (1, 2)).view(4, 3, 4, 3, 4, 8).transpose(2, 3)
        h = self.second(h.reshape(-1, 16, 8)).view(4, 3, 3, 4, 4, 8).transpose(2, 3)
        h = h.reshape(4, 12, 12, 8).roll((2, 2), (1, 2))[:, :10, :10]
        return self.merge(torch.cat([h[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1))


def test_windows(device):
    check(Windows().to(device), image(device), "mm")


class GroupedQueries(nn.Module):
    """Two heads of keys for eight of queries, repeated; rotated by position."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(32, 64), nn.Linear(32, 16)
        self.register_buffer("angle", torch.linspace(0, 3, 24 * 4).view(24, 4).repeat(1, 2))

    def rotate(self, x):
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return x * self.angle.cos() + turned * self.angle.sin()

    def forward(self, x):
        q, k = (layer(x).view(2, 24, -1, 8).transpose(1, 2) for layer in (self.q, self.k))
        k = self.rotate(k)
        repeated = k[:, :, None].expand(2, 2, 4, 24, 8).reshape(2, 8, 24, 8)
        return (self.rotate(q) @ repeated.transpose(2, 3)).softmax(-1)


def test_repeated_keys_are_kept_as_their_source(device):
    less, more = check(GroupedQueries().to(device), words(device), "bmm")
    keys = 2 * 8 * 24 * 8 * 4
    assert more - less >= keys // 2


def test_branches_and_parts_without_gradients(device):
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)).to(device)
    model[1].requires_grad_(False)
    x = words(device)

    def forward():
        h = functional.gelu(model[0](x))
        frozen = functional.silu(model[1](h))
        with torch.no_grad():
            target = functional.gelu(model[2](h)).tanh()
        branch = model[3](frozen) if h.sum() > 1e9 else model[2](frozen * 2)
        return branch * target

    leaves = [p for p in model.parameters() if p.requires_grad]
    assert_exact(forward, leaves, saves="mm", fold=controller(model=model))


def test_shapes_that_change_from_step_to_step(device):
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), HandWrittenRmsNorm(32), nn.Linear(32, 32))
    model = model.to(device)
    fold = controller(model=model)
    for rows in (3, 40, 7, 7, 1, 64, 2):
        x = leaf(rows, 32, device=device, seed=rows).detach()
        assert_exact(lambda x=x: model(x * 1), list(model.parameters()), fold=fold)


def test_accumulated_gradients(device):
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 32))
    model = model.to(device)

    def accumulated(fold):
        model.zero_grad(set_to_none=True)
        losses = []
        for seed in range(3):
            x = leaf(8, 32, device=device, seed=seed).detach()
            with fold:
                losses.append(model(x).square().mean())
        for loss in losses:  # all graphs at once, the first first
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    fold = controller(model=model)
    found, expected = accumulated(fold), accumulated(controller(model=model, derive=False))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert derived(fold)
