# SPDX-License-Identifier: Apache-2.0
"""torch's own operator samples, one operator after another.

Each operator that has a gradient runs on its first sample, and its results go through each of two
others that take one tensor. What comes out is multiplied by itself, which saves it: so it is
derived where the second operator has a recipe, and through the first where that has one, too.
Gradients with exact folding are bitwise those of plain autograd; those at 4 bits are finite where
plain ones are.
"""

import contextlib
import zlib

import backfold
import pytest
import torch
from conftest import OPERATOR_TALLY
from test_operators import OPERATORS, Case, as_finite, cases, problems, same_bits
from torch.testing._internal.opinfo.core import UnaryUfuncInfo

CHUNKS = [OPERATORS[i::9] for i in range(9)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
FOLLOWERS = 2


def followers(dtype: torch.dtype, device: str) -> list:
    return [
        op
        for op in OPERATORS
        if isinstance(op, UnaryUfuncInfo) and dtype in op.supported_backward_dtypes(device)
    ]


def squared(follower):
    def after(value: torch.Tensor) -> torch.Tensor:
        made = follower(value)
        return made * made

    return after


def chains(op, device: str) -> list[Case]:
    """The first sample of an operator, followed by three others. Which, and in which type, is fixed
    by its name, and different for its neighbours."""
    number = zlib.crc32(op.full_name.encode())
    supported = [one for one in DTYPES if one in op.supported_backward_dtypes(device)]
    if not supported:
        return []
    dtype = supported[number % len(supported)]
    all_followers = followers(dtype, device)
    found = []
    for i in range(FOLLOWERS):
        follower = all_followers[(number // len(DTYPES) + 17 * i) % len(all_followers)]
        for case in cases(op, device, dtype, every=False)[:1]:
            case.after = squared(follower)
            found.append((f"{op.full_name}, then {follower.full_name}, {dtype}", case))
    return found


@pytest.mark.parametrize("operators", CHUNKS, ids=range(len(CHUNKS)))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("deterministic", "one_thread", "quick_seeds")
def test_gradients_of_operators_in_a_row(device, operators, request):
    tally = request.config.stash[OPERATOR_TALLY]
    wrong, derived = [], 0
    for op in operators:
        for where, case in chains(op, device):
            try:
                case.plain = case.gradients(contextlib.nullcontext())
            except Exception:  # the second refuses what the first made
                tally["pairs that plain autograd refuses"] += 1
                continue
            tally["pairs of operators"] += 1
            for bits, holds in ((None, same_bits), (4, as_finite)):
                fold = backfold.Controller(bits=bits, adaptive=False, min_bytes=0)
                wrong += [f"{where}: {problem}" for problem in problems(case, fold, holds, tally)]
                if fold.steps:
                    derived += sum(s["kind"] == "derived" for s in fold.report().to_dict()["sites"])
    tally["tensors derived"] += derived
    assert not wrong, "\n".join([f"{len(wrong)} differences", *wrong[:40]])
    assert derived > 20  # a fold that derives nothing would pass all checks above
