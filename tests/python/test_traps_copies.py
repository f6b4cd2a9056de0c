# SPDX-License-Identifier: Apache-2.0
"""Traps of saved-tensor hooks, part five: low-precision copies of tensors that change later."""

import contextlib

import backfold
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Codebook(nn.Module):
    """Multiplies by a copy of a table in bf16, and changes the table afterwards, as an EMA does."""

    def __init__(self, table: str, change):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.change = table, change
        self.trained = nn.Parameter(torch.randn(64, 64))
        self.frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.register_buffer("buffer", torch.randn(64, 64))

    def forward(self, x):
        table = getattr(self, self.table)
        out = (x * self.trained).bfloat16() @ table.bfloat16()
        self.change(table)
        return out


def in_place(table):
    with torch.no_grad():
        table.mul_(0.9)


def by_data(table):
    table.data.mul_(0.9)


def by_a_view_of_data(table):
    table.data[:32].neg_()


def by_a_list(table):
    torch._foreach_mul_([table.data], 0.9)


def by_result(table):
    torch.mul(table.data, 0.9, out=table.data)


def not_at_all(table):
    pass


CHANGES = [in_place, by_data, by_a_view_of_data, by_a_list, by_result]


def gradients(model: nn.Module, device: str, fold=None, after=not_at_all) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 4096, device=device).view(64, 64)
    with fold or contextlib.nullcontext():
        loss = model(x).float().square().mean()
    after(getattr(model, model.table))
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert found and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def folding(model: nn.Module) -> backfold.Controller:
    return backfold.Controller(model, bits=None, min_bytes=0)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["in the block", "after it"])
def test_trap_43_copies_of_buffers_are_not_made_again(device, when, change):
    # A copy recomputed from the buffer's current values gives the gradient of another forward, or
    # an error if the version shows it.
    inside, after = (change, not_at_all) if when == "in the block" else (not_at_all, change)
    plain, folded = (Codebook("buffer", inside).to(device) for _ in range(2))
    expected = gradients(plain, device, after=after)
    fold = folding(folded)
    assert_equal(gradients(folded, device, fold, after), expected)
    assert "parameter copy" not in {site["kind"] for site in fold.report().to_dict()["sites"]}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("table", ["trained", "frozen"])
def test_a_parameter_that_the_block_changes_leaves_its_copies_what_they_were(device, table, change):
    plain, folded = (Codebook(table, change).to(device) for _ in range(2))
    fold = folding(folded)
    assert_equal(gradients(folded, device, fold), gradients(plain, device))
    assert "parameter copy" in {site["kind"] for site in fold.report().to_dict()["sites"]}


def test_a_copy_that_is_used_after_its_parameter_changed_is_no_longer_made_again(device):
    class Late(Codebook):
        def forward(self, x):
            copy = self.frozen.bfloat16()
            self.frozen.data.mul_(0.9)
            return (x * self.trained).bfloat16() @ copy

    plain, folded = (Late("frozen", not_at_all).to(device) for _ in range(2))
    assert_equal(gradients(folded, device, folding(folded)), gradients(plain, device))


def test_a_parameter_that_changes_after_the_block_gets_a_clear_error(device):
    # Its copy is gone by then. A change through .data is not seen: docs/backward.md says so.
    model = Codebook("frozen", not_at_all).to(device)
    with pytest.raises(RuntimeError, match=r"(?s)modified in place before backward.*keep="):
        gradients(model, device, folding(model), after=in_place)
