# SPDX-License-Identifier: Apache-2.0
"""Codecs, and selectors of the tensors they apply to: the values of ``Controller(codec=...)``.

>>> import torch, backfold
>>> from backfold import codecs
>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Tanh(), torch.nn.Flatten())
>>> fold = backfold.Controller(model, codec={torch.nn.Tanh: codecs.PoolResidual(8, 2)})

A codec applies to tensors whose values backward reads. A tensor that is needed only as signs, bits
or indices is kept as those, exactly, whatever the codec. Tensors that are sensitive to rounding
(the results of log_softmax, say) keep the plan's width unless the codec is `Quantize`,
`RunningRange`, `Exact` or `Keep`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from backfold import _C

__all__ = [
    "Codec",
    "Exact",
    "FewBit",
    "Keep",
    "Pool",
    "PoolResidual",
    "Project",
    "Quantize",
    "RunningRange",
    "Where",
]


@dataclasses.dataclass(frozen=True)
class Codec:
    """How a tensor is kept. Use one of its subclasses."""

    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if type(self) is Codec:
            raise TypeError("Codec is only a base class: use Quantize, Pool, ...")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind = {"bool": bool, "int": int, "float": (int, float)}[field.type]
            if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
                raise TypeError(
                    f"{type(self).__name__}: {field.name} must be {_A[field.type]}, got {value!r}"
                )
        _C.check_codec(type(self).__name__, dataclasses.asdict(self))


_A = {"bool": "True or False", "int": "an int", "float": "a number"}


@dataclasses.dataclass(frozen=True)
class Quantize(Codec):
    """The group quantizer at one width: unbiased.

    With `per_sample`, each sample of a batch gets its own width, `bits` on average. Samples with
    larger ranges get more bits, allotted over all tensors by the measured sensitivities (ActNN).
    """

    bits: int = 4
    per_sample: bool = False


@dataclasses.dataclass(frozen=True)
class Pool(Codec):
    """Averages of blocks with sides of `block` positions, and nothing else: biased.

    For 4-D and 5-D maps of any memory format, and 3-D sequences.
    """

    biased: ClassVar[bool] = True
    block: int = 4


@dataclasses.dataclass(frozen=True)
class PoolResidual(Codec):
    """Averages of blocks in bf16, and the residual in `bits` bits: unbiased (DIVISION)."""

    block: int = 8
    bits: int = 2


@dataclasses.dataclass(frozen=True)
class Project(Codec):
    """A random projection of the last dimension to 1 / `ratio` of its size: unbiased (EXACT).

    The projected values are kept in `bits` bits.
    """

    ratio: int = 8
    bits: int = 2


@dataclasses.dataclass(frozen=True)
class RunningRange(Codec):
    """One range per channel that follows the tensor from step to step: unbiased (Mesa).

    Values outside of the running range are not clipped: a step is packed with the union of the
    running range and its own.
    """

    bits: int = 8
    decay: float = 0.9


@dataclasses.dataclass(frozen=True)
class FewBit(Codec):
    """The derivative of GELU or SiLU as one of 2**bits constants: biased."""

    biased: ClassVar[bool] = True
    bits: int = 3


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """Folds only what can be folded exactly, as ``bits=None`` does everywhere."""


@dataclasses.dataclass(frozen=True)
class Keep(Codec):
    """Keeps the tensor by reference, as without Backfold."""


@dataclasses.dataclass(frozen=True)
class Where:
    """Which saved tensors a codec applies to. A field that is left out matches everything.

    Args:
        module: a pattern of module paths, or a class of modules; it includes the modules inside.
        op: the operator or autograd.Function that saves the tensor, as in a report, or a pattern:
            ``"aten::gelu"``.
        dtype: dtype of the tensor.
        min_bytes: the fewest bytes that autograd alone would keep for the tensor.

    >>> Where("encoder.*", op="aten::addmm", min_bytes=1 << 20)
    Where(module='encoder.*', op='aten::addmm', dtype=None, min_bytes=1048576)
    """

    module: str | type[torch.nn.Module] | None = None
    op: str | None = None
    dtype: torch.dtype | None = None
    min_bytes: int = 0

    def __post_init__(self) -> None:
        module: Any = self.module
        is_class = isinstance(module, type) and issubclass(module, torch.nn.Module)
        if module is not None and not is_class and not isinstance(module, str):
            raise TypeError(
                f"Where: module must be a pattern of paths or a class of modules, got {module!r}"
            )
        if module == "":
            raise ValueError("Where: module must be a pattern of paths like 'encoder.*', got ''")
        if self.op is not None and not isinstance(self.op, str):
            raise TypeError(f"Where: op must be a name like 'aten::gelu', got {self.op!r}")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"Where: dtype must be a torch.dtype, got {self.dtype!r}")
        if isinstance(self.min_bytes, bool) or not isinstance(self.min_bytes, int):
            raise TypeError(f"Where: min_bytes must be an int, got {self.min_bytes!r}")
        _C.check_selector(module if isinstance(module, str) else "", self.op or "", self.min_bytes)

    @staticmethod
    def of(selector: Any) -> Where:
        """A selector from one of the short forms that ``codec=`` accepts.

        >>> Where.of("aten::gelu").op
        'aten::gelu'
        >>> Where.of(torch.nn.Conv2d).module
        <class 'torch.nn.modules.conv.Conv2d'>
        >>> Where.of(torch.utils.checkpoint.CheckpointFunction).op
        'CheckpointFunction'
        """
        if isinstance(selector, Where):
            return selector
        if isinstance(selector, str):
            return Where(op=selector) if "::" in selector else Where(selector)
        if isinstance(selector, torch.dtype):
            return Where(dtype=selector)
        if isinstance(selector, type) and issubclass(selector, torch.nn.Module):
            return Where(selector)
        if isinstance(selector, type) and issubclass(selector, torch.autograd.Function):
            return Where(op=selector.__name__)
        raise TypeError(
            "codec: a selector must be a pattern of module paths, a class of modules or of "
            "autograd.Function, the name of an operator, a torch.dtype or a codecs.Where, "
            f"got {selector!r}"
        )
