# SPDX-License-Identifier: Apache-2.0
"""Tensors that are made again in backward: with bits=None, gradients have the bits of plain ones.

Every operator that has a recipe, alone and after another. The other parts: test_derive_layers.py,
_models.py (rounded sources, too), _programs.py, _traps.py, _lifetimes.py, _writes.py, _unseen.py.
"""

import functools

import backfold
import pytest
import torch
from derivation import (
    assert_exact,
    assert_same_bits,
    controller,
    derived,
    gradients,
    leaf,
    sites,
)
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 16
IN_PLACE = "gelu silu sigmoid tanh mish elu celu hardswish relu leaky_relu hardtanh hardsigmoid neg"


@functools.cache
def constants(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A row of positive numbers, a mask and a permutation: small, and alive for good."""
    row = torch.linspace(0.5, 2, SIZE, device=device, dtype=dtype)
    return row, row > 1, torch.arange(SIZE, device=device).flip(0).clone()


ROW, MASK, ORDER = range(3)


def with_constant(which: int, function):
    return lambda h: function(h, constants(h.device, h.dtype)[which])


def positive(h: torch.Tensor) -> torch.Tensor:
    return h * h + 1


def in_place(name: str):
    return lambda h: getattr(torch.ops.aten, f"{name}_")(h * 1.25)


UNARY = {
    "gelu": functional.gelu,
    "gelu by tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "elu": functional.elu,
    "celu": lambda h: functional.celu(h, 0.5),
    "selu": functional.selu,
    "hardswish": functional.hardswish,
    "log_sigmoid": functional.logsigmoid,
    "relu": torch.relu,
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "hardtanh": functional.hardtanh,
    "hardsigmoid": functional.hardsigmoid,
    "threshold": lambda h: functional.threshold(h, 0.1, 0.2),
    "clamp": lambda h: h.clamp(-1, 1),
    "clamp_min": lambda h: h.clamp_min(0.1),
    "clamp_max": lambda h: h.clamp_max(0.1),
    "abs": torch.abs,
    "neg": torch.neg,
    "pow 2": lambda h: h.pow(2),
    "pow 3": lambda h: h**3,
    "square": torch.square,
    "exp": torch.exp,
    "rsqrt": lambda h: positive(h).rsqrt(),
    "sqrt": lambda h: positive(h).sqrt(),
    "reciprocal": lambda h: positive(h).reciprocal(),
    "sin": torch.sin,
    "cos": torch.cos,
    "clone": torch.clone,
    "dropout": lambda h: functional.dropout(h, 0.3),
}
BINARY = {
    "add": with_constant(ROW, torch.add),
    "add a number": lambda h: h + 1.5,
    "add, scaled": with_constant(ROW, lambda h, row: torch.add(h, row, alpha=2)),
    "sub": with_constant(ROW, torch.sub),
    "rsub": lambda h: 1 - h,
    "mul": with_constant(ROW, torch.mul),
    "mul by a number": lambda h: h * 2.5,
    "mul by itself": lambda h: h * h,
    "div": with_constant(ROW, torch.div),
    "div by a number": lambda h: h / 3,
    "addcmul": with_constant(ROW, lambda h, row: torch.addcmul(h, row, row, value=0.5)),
    "lerp": with_constant(ROW, lambda h, row: torch.lerp(h, row.expand_as(h), 0.3)),
    "glu": lambda h: functional.glu(torch.cat([h, h.sin()], -1)),
    "prelu": with_constant(ROW, functional.prelu),
    "where": with_constant(MASK, lambda h, mask: torch.where(mask, h, h.sin())),
    "where, a number": with_constant(MASK, lambda h, mask: torch.where(mask, h, 0.5)),
    "masked_fill": with_constant(MASK, lambda h, mask: h.masked_fill(mask, 0.5)),
    "index_select": with_constant(ORDER, lambda h, order: h.index_select(0, order)),
    "gather": with_constant(
        ORDER, lambda h, order: h.gather(0, order.unsqueeze(1).expand(SIZE, SIZE))
    ),
    "index": with_constant(ORDER, lambda h, order: h[order]),
    "embedding": with_constant(ORDER, lambda h, order: functional.embedding(order, h)),
}
ARRANGED = {
    "transposed copy": lambda h: h.t().contiguous(),
    "cat": lambda h: torch.cat([h, h.sin()], 1),
    "stack": lambda h: torch.stack([h, h.sin()], 1),
    "roll": lambda h: h.roll(3, 0),
    "flip": lambda h: h.flip(0),
    "pad": lambda h: functional.pad(h, (1, 2)),
    "repeat": lambda h: h.repeat(2, 1),
    "expand, copied": lambda h: h.unsqueeze(0).expand(2, SIZE, SIZE).reshape(2 * SIZE, SIZE),
}
MAPS = {
    "max_pool2d": lambda h: functional.max_pool2d(h[None, None], 3, 1, 1),
    "avg_pool2d": lambda h: functional.avg_pool2d(h[None, None], 3, 1, 1),
    "upsample_nearest2d": lambda h: functional.interpolate(h[None, None], scale_factor=2),
    "upsample_bilinear2d": lambda h: functional.interpolate(
        h[None, None], scale_factor=2, mode="bilinear"
    ),
    **{
        f"{mode}_pad{d}d": lambda h, d=d, mode=mode: functional.pad(
            h.reshape(1, *(2,) * (d - 1), -1, SIZE), (0, 1) * d, mode=mode
        )
        for mode in ("reflect", "replicate")
        for d in (1, 2, 3)
    },
}
NORMS = {
    "layer_norm": with_constant(ROW, lambda h, row: functional.layer_norm(h, row.shape, row, row)),
    "layer_norm, no affine": lambda h: functional.layer_norm(h, (SIZE,)),
    "rms_norm": with_constant(ROW, lambda h, row: functional.rms_norm(h, row.shape, row)),
    "group_norm": with_constant(ROW, lambda h, row: functional.group_norm(h, 4, row, row)),
    "batch_norm": with_constant(
        ROW, lambda h, row: functional.batch_norm(h, row * 0, row * 1, row, row, training=True)
    ),
    "batch_norm, no statistics": lambda h: functional.batch_norm(h, None, None, training=True),
}
WRITING = {
    **{f"{name}_": in_place(name) for name in IN_PLACE.split()},
    "add_": with_constant(ROW, lambda h, row: (h * 1.25).add_(row)),
    "sub_": with_constant(ROW, lambda h, row: (h * 1.25).sub_(row)),
    "mul_": with_constant(ROW, lambda h, row: (h * 1.25).mul_(row)),
    "div_": with_constant(ROW, lambda h, row: (h * 1.25).div_(row)),
    "masked_fill_": with_constant(MASK, lambda h, mask: (h * 1.25).masked_fill_(mask, 0.25)),
    "add_ itself": lambda h: h.sin().add_(h),
    "a chain of three": lambda h: (h * 2).add_(1).mul_(0.5).relu_(),
}
OPERATORS = UNARY | BINARY | ARRANGED | MAPS | NORMS | WRITING


NOT_DERIVED = "not derived"


class Case:
    """h = x @ w, which a product saves, then `op(h)`, which another saves."""

    def __init__(self, device: str, name: str = "", dtype: torch.dtype = torch.float32):
        self.adds_up_in_any_order = device == "cuda" and ("pad" in name or "upsample" in name)
        self.leaves = [leaf(SIZE, SIZE, device=device, seed=i, dtype=dtype) for i in range(4)]

    def run(self, op) -> torch.Tensor:
        x, first, second, third = self.leaves
        h = x @ first
        kept = h @ second
        y = op(h)
        out = y.reshape(-1, SIZE) @ third.to(y.dtype)
        return torch.cat([out.to(kept.dtype), kept])

    def problem(self, op, fold) -> str:
        expected = gradients(lambda: self.run(op), self.leaves)
        found = gradients(lambda: self.run(op), self.leaves, fold)
        # On a GPU, backward of such operators adds up in any order. What is made again enters the
        # last two gradients alone.
        first = 2 if self.adds_up_in_any_order else 0
        assert_same_bits(found[first:], expected[first:])
        # In bf16, sums of plain torch differ by 5% from run to run.
        near = 0.02 if self.leaves[0].dtype == torch.float32 else 0.1
        for i in range(first):
            torch.testing.assert_close(found[i], expected[i], rtol=near, atol=near)
        return "" if any("aten::mm" in place for place in derived(fold)) else NOT_DERIVED


def rows(y: torch.Tensor) -> torch.Tensor:
    """SIZE columns again, for a product."""
    return y.reshape(-1)[: y.numel() // SIZE * SIZE].reshape(-1, SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_recipe(device, name, dtype):
    case, op = Case(device, name, dtype), OPERATORS[name]
    assert not case.problem(lambda h: rows(op(h)), controller())


# Each needs a source as large as its result beside it: two are more than a chain may have.
DEMANDING = {"dropout", "gather"}
SECOND = UNARY | BINARY | {name: WRITING[name] for name in ("relu_", "add_", "mul_")}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_recipe_after_another(device, name):
    # A chain that reads the wrong end of it, or forgets a scalar, has other bits.
    case, first, fold = Case(device, name), OPERATORS[name], controller()
    wrong = []
    for other, second in SECOND.items():
        try:
            problem = case.problem(lambda h, g=second: g(rows(first(h))[:SIZE]), fold)
        except AssertionError as error:
            problem = str(error)
        if problem and not (problem == NOT_DERIVED and {name, other} <= DEMANDING):
            wrong.append(f"{other} of {name}: {problem}")
    assert not wrong, wrong


GEOMETRIES = {
    "transposed": lambda h: h.t(),
    "every second": lambda h: h.repeat(1, 2)[:, ::2],
    "offset": lambda h: torch.cat([h, h])[3 : 3 + SIZE],
    "expanded": lambda h: h[:, :1].expand(SIZE, SIZE),
    "strided": lambda h: h.as_strided((SIZE, SIZE), (SIZE - 1, 1)),
}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_sources_that_are_not_contiguous(device, geometry):
    # A kernel takes another loop for such a source, and its last bits may differ.
    case, view = Case(device), GEOMETRIES[geometry]
    for op in (torch.exp, functional.gelu, torch.clone, lambda h: h * 3, positive):
        assert not case.problem(lambda h, op=op: op(view(h)), controller())


PARTS = {
    "transposed": lambda y: y.t(),
    "chunk": lambda y: y.repeat(1, 2).chunk(2, 1)[1],
    "from the second row": lambda y: y[1:],
    "every second": lambda y: y[::2],
    "one column": lambda y: y[:, 3:4].expand(SIZE, SIZE),
    "heads": lambda y: y.view(SIZE, 4, 4).transpose(0, 1).reshape(SIZE, SIZE),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_what_is_derived(device, part):
    case, view = Case(device), PARTS[part]
    for op in (
        functional.gelu,
        torch.clone,
        lambda h: h.t().contiguous(),
        lambda h: (h * 2).relu_(),
    ):
        assert not case.problem(lambda h, op=op: view(op(h)), controller())


def test_two_parts_share_one_recipe(device):
    case = Case(device)

    def both(h):
        y = functional.gelu(h)
        return y[1:].exp() @ y.t()[:, 1:]

    x, first, *_ = case.leaves
    assert_exact(lambda: both(torch.tanh(x @ first)), case.leaves[:2])


def test_what_autocast_casts_is_made_again_as_it_was(device):
    # Under autocast an operator calls itself with other arguments: the types are those inside.
    case = Case(device)
    for dtype in (torch.bfloat16, torch.float16):
        for name in ("gelu", "tanh", "mul", "layer_norm", "exp", "pow 3", "where", "relu_"):

            def forward(name=name, dtype=dtype):
                x, first, second, third = case.leaves
                with torch.autocast(device, dtype):
                    h = x @ first
                    kept = h @ second
                    return (OPERATORS[name](h) @ third).float() + kept

            assert_exact(forward, case.leaves, saves="aten::mm")


def test_derive_false_derives_nothing(device):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    model, x = model.to(device), torch.randn(64, 64, device=device)
    folds = [controller(bits, model, derive=on) for bits in (None, 4) for on in (False, True)]
    for fold in folds:
        gradients(lambda: model(x * 1), list(model.parameters()), fold)
    assert [bool(derived(fold)) for fold in folds] == [False, True, False, True]
    (place,) = sites(folds[1], kind="derived")
    assert (place["module"], place["held_bytes"], place["unique_bytes"]) == ("2", 0, x.nbytes)


@pytest.mark.parametrize("value", [None, 1, "yes", torch.tensor(True)])
def test_derive_is_true_or_false(value):
    with pytest.raises(TypeError, match="derive must be True or False, got"):
        backfold.Controller(derive=value)
