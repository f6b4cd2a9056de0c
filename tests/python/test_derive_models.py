# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made again in backward: rounded sources, and models of other people."""

import copy
import pathlib
import sys

import pytest
import torch
from derivation import (
    assert_same_bits,
    controller,
    derived,
    gradients,
    held,
    leaf,
    relative_error,
    sites,
)
from derivation_layers import Attention, Gated, HandWrittenGelu, HandWrittenRmsNorm, Residual
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")


class Before(nn.Module):
    """x + body(norm(x))."""

    def __init__(self, norm: nn.Module, body: nn.Module):
        super().__init__()
        self.norm, self.body = norm, body

    def forward(self, x):
        return x + self.body(self.norm(x))


def transformer() -> nn.Sequential:
    def block():
        mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        return [Before(nn.LayerNorm(64), Attention(64, 4)), Before(nn.LayerNorm(64), mlp)]

    return nn.Sequential(*block(), *block(), nn.LayerNorm(64), nn.Linear(64, 32))


def gpt2() -> nn.Sequential:
    def block():
        mlp = nn.Sequential(nn.Linear(64, 256), HandWrittenGelu(), nn.Linear(256, 64))
        return [Before(nn.LayerNorm(64), Attention(64, 4)), Before(nn.LayerNorm(64), mlp)]

    return nn.Sequential(*block(), *block(), nn.LayerNorm(64), nn.Linear(64, 32))


def llama() -> nn.Sequential:
    def block():
        attention = Before(HandWrittenRmsNorm(64), Attention(64, 4, dropout=0.0))
        return [attention, Before(HandWrittenRmsNorm(64), Gated(64))]

    return nn.Sequential(*block(), *block(), HandWrittenRmsNorm(64), nn.Linear(64, 32))


def resnet() -> nn.Sequential:
    stem = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, Residual(16), Residual(16), Residual(16), nn.Conv2d(16, 8, 1))


WORDS, IMAGES = (4, 48, 64), (8, 3, 16, 16)
# The share of the bytes that derivation leaves, exact and at 4 bits; measured, and a little more.
SMALL = {
    "transformer": (transformer, WORDS, 0.62, 0.64),
    "gpt2": (gpt2, WORDS, 0.42, 0.44),
    "llama": (llama, WORDS, 0.64, 0.65),
    "resnet": (resnet, IMAGES, 0.62, 0.71),
}


def built(name: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    build, shape, *_ = SMALL[name]
    torch.manual_seed(0)
    return build().to(device), leaf(*shape, device=device).detach()


def folded(model, x, fold, draws: int = 1):
    """Gradients, and their mean error where there are several draws, each of another step."""
    leaves = list(model.parameters())
    expected = gradients(lambda: model(x * 1), leaves)
    found = [gradients(lambda: model(x * 1), leaves, fold) for _ in range(draws)]
    return found, expected, sum(relative_error(one, expected) for one in found) / draws


@pytest.mark.parametrize("name", SMALL)
def test_exact_and_smaller(device, name):
    model, x = built(name, device)
    folds = [controller(model=model, derive=derive) for derive in (True, False)]
    for fold in folds:
        (found,), expected, _ = folded(model, x, fold)
        assert_same_bits(found, expected)
    assert derived(folds[0])
    assert held(folds[0]) < SMALL[name][2] * held(folds[1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", SMALL)
def test_rounded_and_smaller(device, name, bits):
    # Statistics computed again from rounded values, or the wrong end of a chain, score above 1.
    model, x = built(name, device)
    folds = [controller(bits, model, derive=derive) for derive in (True, False)]
    errors = [folded(model, x, fold, draws=4)[2] for fold in folds]
    assert derived(folds[0])
    assert held(folds[0]) < SMALL[name][3] * held(folds[1])
    assert errors[0] < 2 * errors[1]


@pytest.mark.parametrize("name", SMALL)
def test_the_mean_of_rounded_gradients_is_the_plain_one(device, name):
    model, x = built(name, device)
    found, expected, single = folded(model, x, controller(4, model), draws=24)
    mean = [sum(parts) / len(parts) for parts in zip(*found, strict=True)]
    # Unbiased, 24 draws leave 0.2; a ReLU or statistics of rounded values leave more than half.
    assert relative_error(mean, expected) < 0.4 * single


def watch(layer: nn.Module) -> dict:
    """What the layer's last call was given, and its node of the graph."""
    seen = {}

    def keep(module, inputs, output):
        seen["exact"], seen["node"] = inputs[0].detach().clone(), output.grad_fn

    layer.register_forward_hook(keep)
    return seen


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_zeros_of_a_relu_are_exact(device, bits):
    # By ReLU's own bits: the sign of a rounded input is not that of the input.
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.Conv2d(16, 4, 1),
    ).to(device)
    x, fold = leaf(*IMAGES, device=device).detach(), controller(bits, model)
    seen = watch(model[3])
    for _ in range(3):  # what else reads the sign is learned
        with fold:
            loss = model(x).square().mean()
        loss.backward(retain_graph=True)
    place = sites(fold, module="3", slot="input")[0]
    assert place["kind"] == "derived" and place["bits"] == bits
    made, exact = seen["node"]._saved_input, seen["exact"]
    assert (made[exact == 0] == 0).all()
    # Rounding is unbiased where the result is positive: ReLU of rounded values has nothing below 0.
    assert (made[exact > 0] < 0).any()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_slopes_of_a_leaky_relu_are_exact(device, bits, in_place):
    # What is made is one of the two slopes times the same rounded values for every element: the one
    # that the exact values have, also where rounding has changed the sign.
    torch.manual_seed(0)
    slope = 0.25
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.LeakyReLU(slope, inplace=in_place),
        nn.Conv2d(16, 4, 1),
    ).to(device)
    x, fold = leaf(*IMAGES, device=device).detach(), controller(bits, model)
    seen = watch(model[3])
    with fold:
        loss = model(x).square().mean()
    place = sites(fold, module="3", slot="input")[0]
    assert place["kind"] == "derived" and place["recipe"].startswith("leaky_relu")
    draws = 200 if bits == 2 else 50
    made, exact = seen["node"]._saved_input, seen["exact"]
    assert ((made > 0) != (exact > 0)).float().mean() > 0.01
    loss.backward()
    total = torch.zeros_like(exact, dtype=torch.double)
    for _ in range(draws):
        with fold:
            loss = model(x).square().mean()
        total += seen["node"]._saved_input
        loss.backward()
    bias = (total / draws - exact).flatten()
    noise = (made - exact).flatten()
    # By the signs of rounded values, what is negative would be too large on average.
    assert bias[exact.flatten() < 0].mean().abs() < 0.1 * noise.abs().mean()
    assert bias.norm() < 3 * noise.norm() / draws**0.5


def test_the_bits_of_another_reader_are_not_those_of_a_leaky_relu(device):
    # clamp's tell which elements of the same result are below 3.
    fold, weight = controller(4), leaf(64, 64, device=device)
    x = leaf(64, 64, device=device, seed=1)
    with fold:
        y = functional.leaky_relu(torch.tanh(x @ weight), 0.25)
        clamped, product = torch.clamp(y, max=3), y * weight
        exact = y.detach().clone()
        del y
    (place,) = sites(fold, op="aten::mul", kind="derived")
    assert place["recipe"].startswith("leaky_relu")
    assert relative_error([product.grad_fn._saved_self], [exact]) < 0.2
    (clamped.sum() + product.sum()).backward()


def test_a_maximum_is_where_it_was(device):
    # Not where rounded values have theirs, which is too large on average.
    torch.manual_seed(0)
    pool = nn.MaxPool2d(3, 1)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), pool, nn.Conv2d(16, 4, 1)).to(device)
    x, nodes, fold = leaf(*IMAGES, device=device).detach(), {}, controller(4, model)
    for at in (1, 3):
        model[at].register_forward_hook(lambda _, __, out, at=at: nodes.update({at: out.grad_fn}))
    with fold:
        loss = model(x).square().mean()
    place = sites(fold, module="3", slot="input")[0]
    assert place["kind"] == "derived" and place["recipe"] == "max_pool2d_with_indices, gelu"
    rounded = functional.gelu(nodes[1]._saved_self)
    made = nodes[3]._saved_input
    loss.backward()
    _, where = functional.max_pool2d(model[:2](x), 3, 1, return_indices=True)
    expected = rounded.flatten(2).gather(2, where.flatten(2)).view_as(made)
    torch.testing.assert_close(made, expected)
    assert (made < pool(rounded) - 1e-3).float().mean() > 0.01


@pytest.mark.parametrize("bits", [2, 4])
def test_statistics_of_a_norm_are_exact(device, bits):
    # Each row of a norm's result, made with the statistics of the first run, has a mean and a size
    # that are off by noise; those of rounded rows would be 0 and 1 to the last digit.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to(device)
    x, seen, fold = leaf(256, 64, device=device).detach(), {}, controller(bits, model)
    model[1].register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0].detach()))
    model[2].register_forward_hook(lambda module, inputs, output: seen.update(node=output.grad_fn))
    with fold:
        loss = model(x * 1).square().mean()
    source = seen.pop("x")
    assert sites(fold, module="2", slot="mat1")[0]["kind"] == "derived"
    mean, rstd = (
        source.mean(1, keepdim=True),
        (source.var(1, correction=0, keepdim=True) + 1e-5).rsqrt(),
    )
    del source
    made = seen["node"]._saved_mat1
    loss.backward()
    exact = (model[0](x).detach() - mean) * rstd
    error = made - exact
    assert 0 < error.norm() < {2: 1.0, 4: 0.2}[bits] * exact.norm()
    assert made.detach().mean(1).abs().max() > 1e-4


class Differences:
    """Rows that are small beside the values they are made of, which products pack."""

    def __init__(self, device: str):
        self.x = leaf(64, 64, device=device).detach()
        self.leaves = [leaf(64, 64, device=device, seed=1 + i) for i in range(5)]

    def difference(self):
        first, second, third, fourth, last = self.leaves
        p, q = self.x @ first, self.x @ (first + 1e-3 * fourth)
        kept = p @ second + q @ third
        return kept.tanh() + (functional.layer_norm(p - q, (64,)) @ last).tanh()

    def small_rows(self):
        first, second, _, _, last = self.leaves
        small = torch.ones(64, 1, device=self.x.device)
        small[::2] = 1e-4
        p = self.x * small @ first
        kept = p @ second  # two rows to a group
        return kept.tanh() + (functional.layer_norm(p, (64,), eps=1e-12) @ last).tanh()


@pytest.mark.parametrize("rows", [name for name in ("difference", "small_rows")])
def test_a_norm_does_not_multiply_the_noise_of_other_rows(device, rows):
    # 200 and 500 times the gradient where the norm, or its result, reads a packet of a product.
    case, errors = Differences(device), []
    forward, leaves = getattr(case, rows), case.leaves
    expected = gradients(forward, leaves)
    for derive in (True, False):
        found = gradients(forward, leaves, controller(8, derive=derive))
        errors.append(relative_error(found[-1:], expected[-1:]))
    assert errors[0] < 3 * errors[1] < 0.2


transformers = pytest.importorskip("transformers")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "zoo"))

FOREIGN = [
    "gpt2",
    "bert",
    "llama",
    "swin",
    "resnet",
    "t5",
    "vit",
    "mistral",
    "gpt_neox",
    "convnext",
]


def check_smaller(model: nn.Module, forward) -> None:
    """With the bits of plain training, and with fewer bytes."""
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = copy.deepcopy(model.state_dict())

    def run(fold=None):
        model.load_state_dict(state)
        return gradients(forward, leaves, fold)

    expected = run()
    folds = [controller(model=model, derive=derive) for derive in (True, False)]
    for fold in folds:
        for _ in range(2):  # sites have learned something at the second step
            assert_same_bits(run(fold), expected)
    assert derived(folds[0])
    assert held(folds[0]) < 0.9 * held(folds[1])


@pytest.mark.parametrize("name", FOREIGN)
def test_models_of_transformers(name):
    from errors import RandomWeights
    from transformers_models import build

    torch.manual_seed(0)
    task = build(name)
    model = task.model.train()
    if getattr(model.config, "_attn_implementation", "eager") != "eager":
        model.set_attn_implementation("eager")
    loss = RandomWeights()
    check_smaller(model, lambda: loss(task.outputs()))
