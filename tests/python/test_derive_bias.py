# SPDX-License-Identifier: Apache-2.0
"""How much of a folded gradient's error does not average out.

A recipe that is not linear makes a biased tensor of unbiased packets. The share of the bias in the
error grows with the batch, as noise averages out over tokens and bias does not: 2,048 tokens here.
"""

import os
import typing
from collections.abc import Callable

import pytest
import torch
from derivation import controller, derived
from derivation_layers import Residual
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT, DRAWS, SHARPNESS = 0.02, 48, 0.005


class Share(typing.NamedTuple):
    """Of the bias in the error, as energies, and the standard error of that figure."""

    bias: float
    uncertain: float

    def __str__(self) -> str:
        return f"{self.bias:.4f} +- {self.uncertain:.4f}"


def share_of_bias(errors: torch.Tensor) -> Share:
    """Of errors of independent draws, one in each row.

    The products of two different draws average to the energy of the bias, without a term from the
    noise; those of a draw with itself to the energy of the error. The standard error is jackknife.
    """
    n, products = len(errors), errors.double() @ errors.double().T
    own, every = products.diagonal(), products.sum()

    def share(pairs, alone, draws):
        return (pairs - alone) / (draws - 1) / alone

    whole = share(every, own.sum(), n)
    without_one = share(every - 2 * products.sum(1) + own, own.sum() - own, n - 1)
    spread = (n - 1) / n * (without_one - without_one.mean()).square().sum()
    return Share(whole.item(), spread.sqrt().item())


def language_model(kind: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    words, length = 64, 32
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=words,
            n_positions=length,
            n_embd=64,
            n_layer=2,
            n_head=4,
            activation_function="gelu_new",
            attn_implementation="eager",
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=words,
            max_position_embeddings=length,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
        model = transformers.LlamaForCausalLM(config)
    starts, strides = torch.randint(0, words, (64, 1)), torch.randint(1, 5, (64, 1))
    ids = (starts + strides * torch.arange(length)) % words
    return model, lambda: model(input_ids=ids, labels=ids, use_cache=False).loss


def resnet() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    stem = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    model = nn.Sequential(*stem, Residual(16), Residual(16), Residual(16), *head)
    labels = torch.randint(0, 10, (64,))
    images = torch.randn(64, 3, 16, 16) + torch.randn(10, 3, 16, 16)[labels]
    return model, lambda: functional.cross_entropy(model(images), labels)


def gradient(model, loss, fold=None) -> torch.Tensor:
    model.zero_grad()
    if fold is None:
        value = loss()
    else:
        with fold:
            value = loss()
    value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def trained(name: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    model, loss = resnet() if name == "resnet" else language_model(name)
    optimizer = torch.optim.AdamW(model.train().parameters(), 3e-3)
    for _ in range(10):
        gradient(model, loss)
        optimizer.step()
    return model, loss


def measured(name: str, planned: bool, derive: bool) -> Share:
    model, loss = trained(name)
    fold = controller(4, model, adaptive=planned, derive=derive)
    plain = gradient(model, loss)
    for _ in range(4):  # sites learn, and the plan is made
        gradient(model, loss, fold)
    share = share_of_bias(torch.stack([gradient(model, loss, fold) - plain for _ in range(DRAWS)]))
    assert bool(derived(fold)) == derive
    return share


@pytest.mark.parametrize("planned", [False, True], ids=["one_width", "planned"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
def test_bias_is_a_small_part_of_the_error(name, planned):
    # At most 0.004. Norms by new statistics of rounded values score 0.026 on GPT-2, ReLU by the
    # sign of rounded values 0.04 and 0.06 on ResNet.
    share = measured(name, planned, derive=True)
    print(f"{name}, {'planned' if planned else 'one width'}: {share}")
    assert share.uncertain < SHARPNESS
    if share.bias > LIMIT + share.uncertain:
        stored = measured(name, planned, derive=False)
        pytest.fail(f"bias is {share} of the error; with derive=False it is {stored}")


@pytest.mark.parametrize("bias", [0.0, 0.01, 0.1])
def test_the_estimate_finds_a_known_bias(bias):
    errors = torch.randn(DRAWS, 10_000, generator=torch.Generator().manual_seed(0))
    found = share_of_bias(errors * (1 - bias) ** 0.5 + bias**0.5)
    assert abs(found.bias - bias) < 4 * found.uncertain < 0.02
