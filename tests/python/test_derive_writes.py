# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made again in backward, whose sources the program writes over.

Autograd did not save such a source, so the program is correct. Each test fails with the gradient of
the changed values where a write goes unnoticed.
"""

import pytest
import torch
from derivation import (
    assert_exact,
    assert_same_bits,
    controller,
    derived,
    gradients,
    leaf,
    relative_error,
)
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 32
NOT_AT_ALL, IN_BLOCK, AFTER = "not at all", "in the block", "after it"


def without_gradients(x):
    with torch.no_grad():
        x.add_(1)


def by_set_item(x):
    x[3:, 1] = 7


def by_out(x):
    torch.add(x.detach(), 1, out=x.detach())


def by_storage(x):
    alias = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach().untyped_storage())
    alias.zero_()


def by_two_views(x):
    x.detach().view(-1)[5:].view(-1, 1).neg_()


class Wrapper(torch.Tensor):
    """A tensor that hands each operator on to the one that it wraps."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*[a.inner if isinstance(a, cls) else a for a in args], **(kwargs or {}))


def by_a_wrapper(x):
    for _ in range(3):  # what a kernel calls is skipped from its second call on
        Wrapper(x.data).add_(1)


class InsideDetach(TorchDispatchMode):
    """Runs something inside each call of detach."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            self.change()
        return function(*args, **(kwargs or {}))


def by_a_mode(x):
    data = x.data
    for _ in range(3):
        with InsideDetach(lambda: data.add_(1)):
            torch.ones(2).detach()


COUNTED = {  # autograd's count of writes tells
    "in place": lambda x: x.add_(1),
    "in place, without gradients": without_gradients,
    "by detach": lambda x: x.detach().mul_(3),
    "by a view": lambda x: x.detach()[3:].t().zero_(),
    "by views of views": by_two_views,
    "by a list": lambda x: torch._foreach_add_([x.detach()], 1),
    "by an index": by_set_item,
    "by out=": by_out,
    "by copy_": lambda x: x.detach().copy_(x.detach().flip(0)),
    "at random": lambda x: x.detach().uniform_(),
}
NOT_COUNTED = {
    "by .data": lambda x: x.data.add_(1),
    "by a view of .data": lambda x: x.data[5:].neg_(),
    "by a list of .data": lambda x: torch._foreach_mul_([x.data], 3),
    "by out= of .data": lambda x: torch.mul(x.data, 3, out=x.data),
    "by the storage": by_storage,
    "by a wrapper": by_a_wrapper,
    "inside a mode": by_a_mode,
}


class Cast:
    """y = x.float() is saved, x is not: half the bytes, so that it is kept instead."""

    def __init__(self, device: str):
        self.leaves = [leaf(SIZE, SIZE, device=device, seed=i) for i in range(5)]

    def run(self, fold=None, change=None, when: str = NOT_AT_ALL, ops=()):
        a, first, second, *_ = self.leaves
        with fold or torch.enable_grad():
            x = (a @ first).bfloat16()
            y = x.float()
            for op in ops:
                y = op(y)
            out = y @ second
            del y
            if when == IN_BLOCK:
                change(x)
            loss = out.square().mean()
        if when == AFTER:
            change(x)
        return torch.autograd.grad(loss, self.leaves, allow_unused=True)


CHAINS = {"cast": (), "and scaled": (lambda y: y * 3,), "and twice more": (torch.neg, torch.sin)}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("change", COUNTED | NOT_COUNTED)
def test_a_source_that_changes_in_the_block(device, change, chain):
    case, change, ops = Cast(device), (COUNTED | NOT_COUNTED)[change], CHAINS[chain]
    expected = case.run(ops=ops)
    fold = controller()
    assert_same_bits(case.run(fold, change, IN_BLOCK, ops), expected)
    assert derived(fold)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", COUNTED | NOT_COUNTED)
def test_a_source_that_changes_without_gradients(device, change, mode):
    case, change = Cast(device), (COUNTED | NOT_COUNTED)[change]
    expected, fold = case.run(), controller()

    def quietly(x):
        with mode():
            change(x)

    for _ in range(2):  # what a kernel calls is seen at first, and skipped then
        assert_same_bits(case.run(fold, quietly, IN_BLOCK), expected)
    assert derived(fold)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("change", COUNTED)
def test_a_source_that_changes_after_the_block_is_named(device, change, chain):
    case, fold = Cast(device), controller()
    with pytest.raises(RuntimeError, match=r"(?s)BFloat16.*modified in place.*derive=False"):
        case.run(fold, COUNTED[change], AFTER, CHAINS[chain])
    assert derived(fold)
    off = controller(derive=False)
    assert_same_bits(
        case.run(off, COUNTED[change], AFTER, CHAINS[chain]), case.run(ops=CHAINS[chain])
    )


def test_a_source_that_changes_in_the_next_block_is_named(device):
    case, fold = Cast(device), controller()

    def change(x):
        with fold:
            x.add_(1)

    with pytest.raises(RuntimeError, match="modified in place"):
        case.run(fold, change, AFTER)


def test_a_source_that_changes_in_a_block_of_another_controller_is_noticed(device):
    case, fold, other = Cast(device), controller(), controller()

    def change(x):
        with other:
            x.data.add_(1)

    expected = case.run()
    try:
        found = case.run(fold, change, IN_BLOCK)
    except RuntimeError as error:
        assert "modified in place" in str(error)
    else:
        assert_same_bits(found, expected)


@pytest.mark.parametrize("change", COUNTED | NOT_COUNTED)
@pytest.mark.parametrize("op", [functional.gelu, torch.clone, lambda h: h * 2, torch.sigmoid])
def test_a_result_that_changes_before_it_is_saved(device, op, change):
    # It is no longer what its recipe makes.
    a, first, second, *_ = leaves = Cast(device).leaves
    change = (COUNTED | NOT_COUNTED)[change]

    def forward():
        h = a @ first
        y = op(h)
        torch.manual_seed(3)
        change(y)
        return y @ second + h.sum()

    try:
        expected = gradients(forward, leaves)
    except RuntimeError:  # sigmoid saves its result: plain autograd raises, and so must we
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(forward, leaves, controller())
    else:
        assert_same_bits(gradients(forward, leaves, controller()), expected)


def test_values_of_one_storage_are_told_apart(device):
    # Three writes, each value saved by a product of its own.
    a, first, second, third, fourth = leaves = Cast(device).leaves

    def forward():
        h = a @ first
        x = h * 2
        total = (x.clone()) @ second
        x.add_(h)
        total = total + x.clone() @ third
        x.sigmoid_()
        return total + (x * 1) @ fourth

    assert_exact(forward, leaves, saves="mm")


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, SIZE)
        self.norm = nn.GroupNorm(4, SIZE)
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, words):
        return self.out(self.norm(self.words(words)))


PARAMETERS = {"norm.bias": True, "words.weight": True, "norm.weight": False}


@pytest.mark.parametrize("when", [IN_BLOCK, AFTER])
@pytest.mark.parametrize("changed", PARAMETERS)
def test_parameters_that_change_before_backward(device, changed, when):
    # Plain autograd needs neither the bias nor the table; the norm's weight it has saved.
    words = torch.arange(40, device=device) % 50

    def run(fold=None):
        model = Normed().to(device)
        with fold(model) if fold else torch.enable_grad():
            loss = model(words).square().mean()
            if when == IN_BLOCK:
                without_gradients(model.get_parameter(changed))
        if when == AFTER:
            without_gradients(model.get_parameter(changed))
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    folds = []

    def fold(model):
        folds.append(controller(model=model))
        return folds[0]

    if not PARAMETERS[changed]:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run()
        with pytest.raises(RuntimeError, match="modified"):
            run(fold)
    elif when == AFTER:
        with pytest.raises(RuntimeError, match="modified in place before backward"):
            run(fold)
    else:
        assert_same_bits(run(fold), run())
    assert derived(folds[0])


def test_indices_that_change_in_the_block(device):
    # The indices of x[indices] are a list in which places may be empty.
    a, first, second, *_ = Cast(device).leaves

    def forward():
        order = torch.arange(SIZE, device=device).flip(0).clone()
        h = (a @ first).detach().requires_grad_()
        y = h[:, order].exp()
        out = h[:, order] @ second
        order.zero_()
        return out + y.detach()

    assert_same_bits(gradients(forward, [second], controller()), gradients(forward, [second]))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_source_that_changes_in_the_block_lossy(device, bits):
    # The packet of the old values must not be read from the memory that now has new ones.
    a, first, second, third, *_ = leaves = Cast(device).leaves

    def forward():
        h = a @ first
        kept = torch.mm(h, second)  # packs h
        y = (h * 2 + 1) @ third
        h.data.mul_(100)
        return kept + y

    expected = gradients(lambda: (lambda h: h @ second + (h * 2 + 1) @ third)(a @ first), leaves)
    fold = controller(bits)
    found = gradients(forward, leaves, fold)
    assert derived(fold)
    assert relative_error(found[2:], expected[2:]) < {4: 0.3, 8: 0.02}[bits]  # of the new: 50


def test_memory_that_is_taken_away_is_named_not_read():
    # FSDP frees a parameter's memory between forward and backward.
    model = Normed()
    fold = controller(model=model)
    with fold:
        loss = model(torch.arange(40)).square().mean()
    storage = model.norm.bias.untyped_storage()
    kept = storage.clone()
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="derive=False"):
        loss.backward(retain_graph=True)
    storage.resize_(kept.nbytes())
    storage.copy_(kept)
    loss.backward()
    assert derived(fold)
