# SPDX-License-Identifier: Apache-2.0
"""Functions of other libraries: exact unless the table or the user says otherwise."""

import backfold
import pytest
import torch
from backfold import codecs
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Attention(torch.autograd.Function):
    """Saves a log-sum-exp, as fused kernels do."""

    @staticmethod
    def forward(ctx, scores):
        total = scores.logsumexp(-1, keepdim=True).expand_as(scores).contiguous()
        ctx.save_for_backward(scores, total)
        return (scores - total).exp()

    @staticmethod
    def backward(ctx, gradient):
        scores, total = ctx.saved_tensors
        result = (scores - total).exp()
        return result * (gradient - (gradient * result).sum(-1, keepdim=True))


class Finished(torch.autograd.Function):
    """Computes its gradient in forward, as fused losses do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(2 * x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x * 2)


def leaf(device: str, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 128, generator=generator).to(device, dtype).requires_grad_()


def step(function, x: torch.Tensor, **options) -> tuple[torch.Tensor, list[dict]]:
    """The gradient, and what the report says about the function."""
    model = Model(function)
    options = {"bits": 4, "adaptive": False, "derive": False, **options}
    fold = backfold.Controller(model, min_bytes=0, **options)
    with fold:
        out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    sites = fold.report().to_dict()["sites"]
    return gradient, [site for site in sites if site["op"] == function.__name__]


def plain(function, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(Model(function)(x).square().sum(), x)[0]


@pytest.mark.parametrize("function", [Attention, Finished])
@pytest.mark.parametrize("adaptive", [False, True])
def test_trap_45_functions_that_nobody_knows_are_exact(device, function, adaptive):
    # At 8 bits, which they had, the gradient of Finished is off by 0.4%.
    x = leaf(device)
    gradient, sites = step(function, x, adaptive=adaptive)
    assert torch.equal(gradient, plain(function, x))
    for site in sites:
        assert site["kind"] == "raw"
        assert site["reason"] == "an unknown function, kept exact; codec= opens it"


def test_trap_45_operators_of_other_libraries_are_exact(device):
    @torch.library.custom_op("backfold_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, gradient):
        return 2 * gradient + 0 * ctx.saved_tensors[0]

    twice.register_autograd(backward, setup_context=save)
    x = leaf(device)
    fold = backfold.Controller(bits=4, min_bytes=0, derive=False, adaptive=False)
    with fold:
        out = twice(x * 2)
    out.sum().backward()
    kinds = {site["op"]: site["kind"] for site in fold.report().to_dict()["sites"]}
    assert kinds and set(kinds.values()) <= {"raw", "parameter", "alive"}


OPENED = [
    {Attention: codecs.Quantize(8)},
    {codecs.Where(op="Attention"): codecs.Quantize(8)},
    {codecs.Where(op="Attent*", dtype=torch.float32): codecs.Quantize(8)},
    {codecs.Where("*", op="Attention", min_bytes=1): codecs.Quantize(8)},
    {"*": codecs.Quantize(4), codecs.Where(op="Attention"): codecs.Quantize(8)},
]


@pytest.mark.filterwarnings("ignore:backfold. codec. no tensor saved in the first step matches")
@pytest.mark.parametrize("codec", OPENED)
def test_a_function_is_opened_by_a_selector_that_names_it(device, codec):
    x = leaf(device)
    gradient, sites = step(Attention, x, codec=codec)
    assert {(site["kind"], site["bits"]) for site in sites} == {("lossy", 8)}
    expected = plain(Attention, x)
    assert not torch.equal(gradient, expected)
    assert (gradient - expected).norm() < 0.1 * expected.norm()


def test_an_opened_function_gets_the_width_that_the_user_gives(device):
    _, sites = step(Attention, leaf(device), codec={Attention: codecs.Quantize(2)})
    assert {site["bits"] for site in sites} == {2}


CLOSED = [
    codecs.Quantize(4),
    {"*": codecs.Quantize(4)},
    {Model: codecs.Quantize(4)},
    {torch.float32: codecs.Quantize(4)},
    {codecs.Where(min_bytes=1): codecs.Quantize(4)},
]


@pytest.mark.filterwarnings("ignore:backfold. codec. no tensor saved in the first step matches")
@pytest.mark.parametrize("codec", CLOSED)
def test_other_selectors_do_not_open_it(device, codec):
    # Such selectors are about modules and types: the user may not know that one contains a fused
    # kernel.
    x = leaf(device)
    gradient, sites = step(Attention, x, codec=codec)
    assert {site["kind"] for site in sites} == {"raw"}
    assert torch.equal(gradient, plain(Attention, x))


class SwishImplementation(torch.autograd.Function):
    """Like EfficientNet's: a name that the table knows."""

    @staticmethod
    def forward(ctx, i):
        ctx.save_for_backward(i)
        return i * i.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (i,) = ctx.saved_tensors
        gate = i.sigmoid()
        return gradient * (gate * (1 + i * (1 - gate)))


class FlashAttnFunc(torch.autograd.Function):
    """Saves what flash-attention does, in its order, as copies: kernels need their own layout."""

    @staticmethod
    def forward(ctx, x):
        total = torch.linspace(1, 2, x.numel(), device=x.device).view_as(x).float()
        ctx.save_for_backward(x.clone(), x.clone(), x.clone(), x.clone(), total)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.saved_tensors[4].flatten()[0] == 1
        return gradient


def test_functions_of_the_table_are_folded(device):
    x = leaf(device)
    gradient, sites = step(SwishImplementation, x)
    assert [(site["kind"], site["bits"]) for site in sites] == [("lossy", 4)]
    expected = plain(SwishImplementation, x)
    assert 0 < (gradient - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_for_some_of_the_tensors_that_a_function_saves(device, dtype):
    # For fp32 attention nothing guarantees that the fifth tensor is not a query.
    _, sites = step(FlashAttnFunc, leaf(device, dtype))
    found = [(site["kind"], site["bits"]) for site in sorted(sites, key=lambda one: one["slot"])]
    if dtype == torch.bfloat16:
        assert found == [("lossy", 6), ("lossy", 6), ("lossy", 4), ("lossy", 4), ("raw", 0)]
    else:
        assert found == [("raw", 0)] * 5


def test_what_a_checkpoint_starts_again_from_is_exact_and_says_why(device):
    x = leaf(device)
    fold = backfold.Controller(bits=4, min_bytes=0, derive=False, adaptive=False)
    with fold:
        h = torch.utils.checkpoint.checkpoint(torch.exp, x * 2, use_reentrant=True)
    h.sum().backward()
    assert torch.equal(x.grad, 2 * (x.detach() * 2).exp())
    (site,) = (one for one in fold.report().to_dict()["sites"] if one["op"] == "CheckpointFunction")
    assert (site["kind"], site["reason"]) == ("raw", "backward runs the forward again from it")
