# SPDX-License-Identifier: Apache-2.0
"""Chains over a rounded packet that one kernel runs while it decodes.

Such a kernel computes in fp32 and rounds once. torch's operators, one after the other in bf16,
round each result, and are off by more than a unit in the last place somewhere in thousands of
elements. So a tensor that is within three quarters of a unit everywhere came from one kernel.
Programs that save tensors on their way have several packets; those are compared at 16 bits.
"""

import math

import pytest
import torch
from conftest import DEVICES
from derivation import controller, derived, gradients, leaf, relative_error
from torch.nn import functional

ROWS, WIDTH = 96, 256


def gelu_by_hand(x, t):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


PROGRAMS = {
    "numbers": lambda x, t: ((x * 3.0 + 0.7) / 1.9 - 0.1) * 0.3,
    "reversed": lambda x, t: 1.7 - (-x) * 0.3,
    "gated by itself": lambda x, t: x * torch.sigmoid(1.702 * x) * 0.9,
    "a row of weights": lambda x, t: (x * t["row"] + t["other_row"]) * 1.1,
    "a number for each row": lambda x, t: x * t["column"] * t["row"],
    "a sum with a tensor": lambda x, t: (x * 0.7 + t["whole"]) * 0.9,
    "a difference": lambda x, t: torch.sub(t["whole"], x * 1.3, alpha=0.7) * 1.1,
}
SAVING = {
    "powers": lambda x, t: (x.square() + 0.3 * x.pow(3)) * 0.7,
    "gelu by hand": gelu_by_hand,
    "silu of a sum": lambda x, t: functional.silu(x * 0.7 + 0.9 * t["whole"]) * 0.8 + x,
    "a norm": lambda x, t: (
        functional.layer_norm(x, (WIDTH,), t["row"], t["other_row"]) * 0.7 + t["whole"]
    ),
    "a norm by hand": lambda x, t: (
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * t["row"]
    ),
    "a gate": lambda x, t: functional.silu(x) * (x * 0.3 + t["whole"]) - x,
    "a residual": lambda x, t: functional.relu(x * 0.7 + t["whole"]),
    "dropout": lambda x, t: functional.dropout(functional.gelu(x * 1.1), 0.3) + t["whole"],
}


def operands(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {"whole": (ROWS, WIDTH), "row": (WIDTH,), "other_row": (WIDTH,), "column": (ROWS, 1)}
    return {
        name: leaf(*shape, device=device, seed=i + 5, dtype=dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_rounds_once(name, device):
    x = leaf(ROWS, WIDTH, device=device)
    tensors = operands(device, torch.bfloat16)
    readers = [torch.ones_like(x, dtype=t).requires_grad_() for t in (x.dtype, torch.bfloat16)]
    fold = controller(bits=8)
    # The gradients of the readers are what was saved of x, and of the program's result.
    with fold:
        value = x @ torch.eye(WIDTH, device=device)
        read = value * readers[0], PROGRAMS[name](value.bfloat16(), tensors) * readers[1]
    del value
    torch.stack([one.float() for one in read]).sum().backward()
    decoded, made = (reader.grad.double() for reader in readers)
    exact = {key: tensor.detach().double() for key, tensor in tensors.items()}
    expected = PROGRAMS[name](decoded, exact)
    assert (decoded - x.double()).abs().max() > 0, "x was not rounded"
    unit = 2.0 ** (expected.abs().clamp(min=1e-2).log2().floor() - 7)
    assert ((made - expected).abs() / unit).max() < 0.75


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*PROGRAMS, *SAVING])
def test_a_program_is_what_it_was(name, device):
    """Rounding to 16 bits is 1e-5; a step left out, or out of place, is most of the gradient."""
    x = leaf(ROWS, WIDTH, device=device)
    tensors = operands(device, torch.float32)
    weight = leaf(WIDTH, WIDTH, device=device, seed=11)
    other, last = (leaf(WIDTH, WIDTH, device=device, seed=seed) for seed in (12, 13))

    def forward():
        value = x @ weight * 0.1
        return value @ other + (PROGRAMS | SAVING)[name](value, tensors) @ last

    leaves = [x, weight, other, last, *tensors.values()]
    fold = controller(bits=16)
    assert relative_error(gradients(forward, leaves, fold), gradients(forward, leaves)) < 1e-3
    assert derived(fold)
