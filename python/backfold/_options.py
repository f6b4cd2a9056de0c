# SPDX-License-Identifier: Apache-2.0
"""What a user says about memory and probes, as one validated value each."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Final, NamedTuple

from backfold.codecs import Codec, Pool, PoolResidual, Project, Quantize, RunningRange

WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 16)
DEFAULT_BITS: Final = 4


class Unset(enum.Enum):
    """Of an argument that may be None and was left out."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class Target(NamedTuple):
    """What is to be kept: a mean width, a ratio, a number of bytes, or only what stays exact."""

    kind: str  # "bits", "ratio", "budget" or "exact"
    value: float
    adaptive: bool


_EXACT: Final = Target("exact", 0.0, False)

_LEVELS: Final = {
    "L0": _EXACT,
    "L1": Target("bits", 4.0, False),
    "L1.1": Target("bits", 8.0, False),
    "L1.2": Target("bits", 2.0, False),
    "L2": Target("bits", 4.0, True),
    "L2.1": Target("bits", 3.0, True),
    "L2.2": Target("bits", 2.0, True),
    "paper-L0": _EXACT,
    "paper-L1": Target("bits", 4.0, True),
    "actnn-L0": _EXACT,
    "actnn-L1": _EXACT,
    "actnn-L2": Target("bits", 4.0, False),
    "actnn-L3": Target("bits", 2.0, True),
    "pooled": _EXACT,
    "division": _EXACT,
    "mesa": _EXACT,
    "exact-project": _EXACT,
}

# What of these levels is kept by another codec than the plan's; the rest follows the target.
LEVEL_CODECS: Final[dict[str, Codec | dict[Any, Codec]]] = {
    "actnn-L1": {"aten::convolution": Quantize(4)},
    "actnn-L3": Quantize(2, per_sample=True),
    "pooled": {"aten::convolution": Pool(4)},
    "division": PoolResidual(8, 2),
    "mesa": RunningRange(8),
    # Of a product with a weight the error stays in the gradient of that weight.
    "exact-project": {"aten::addmm": Project(8, 2), "aten::mm": Project(8, 2)},
}

# The level, what it needs that is not there, and the level that is the same without it.
_REFUSED_LEVELS: Final = {
    "L3": ("offloading", "L2"),
    "paper-L2": ("offloading", "paper-L1"),
    "paper-CB1": ("checkpointing", "paper-L1"),
    "paper-CB2": ("checkpointing and memory-efficient attention", "paper-L1"),
    "actnn-L4": ("offloading", "actnn-L3"),
    "actnn-L5": ("offloading and defragmentation", "actnn-L3"),
}

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_UNITS_BY_FOLDED_NAME: Final = {unit.lower(): size for unit, size in _UNITS.items()}
_SIZE: Final = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def target_of(
    bits: float | Unset | None = UNSET,
    ratio: float | None = None,
    budget: int | str | None = None,
    level: str | None = None,
    adaptive: bool = True,
) -> Target:
    """The one target that the arguments name; 4 bits where they name none.

    >>> target_of(bits=3.5)
    Target(kind='bits', value=3.5, adaptive=True)
    >>> target_of(budget="6 GiB")
    Target(kind='budget', value=6442450944.0, adaptive=True)
    """
    if not isinstance(adaptive, bool):
        raise TypeError(f"adaptive must be True or False, got {adaptive!r}")
    given = {
        name: value
        for name, value, default in (
            ("bits", bits, UNSET),
            ("ratio", ratio, None),
            ("budget", budget, None),
            ("level", level, None),
        )
        if value is not default
    }
    if len(given) > 1:
        both = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{both} cannot be given together: each alone says how much is kept")
    if level is not None:
        return _of_level(level, adaptive)
    if not adaptive and (ratio is not None or budget is not None):
        ((name, value),) = given.items()
        raise ValueError(
            f"{name}={value!r} needs a plan, which adaptive=False forbids: give bits instead"
        )
    if ratio is not None:
        return Target("ratio", _ratio(ratio), True)
    if budget is not None:
        return Target("budget", float(_bytes(budget)), True)
    if bits is None:
        return _EXACT
    return Target("bits", _bits(DEFAULT_BITS if bits is UNSET else bits, adaptive), adaptive)


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integral(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _bits(bits: Any, adaptive: bool) -> float:
    if not _is_real(bits):
        raise TypeError(f"bits must be a number from 1 to 16 or None, got {bits!r}")
    if not adaptive and bits not in WIDTHS:
        widths = ", ".join(str(width) for width in WIDTHS)
        raise ValueError(
            f"bits must be one of {widths} with adaptive=False, got {bits!r}; "
            "adaptive=True takes any mean from 1 to 16"
        )
    if not 1 <= bits <= 16:
        raise ValueError(f"bits must be from 1 to 16, got {bits!r}")
    return float(bits)


def _ratio(ratio: Any) -> float:
    if not _is_real(ratio):
        raise TypeError(f"ratio must be a number above 1, got {ratio!r}")
    if not 1 < ratio < math.inf:
        raise ValueError(f"ratio must be above 1 and finite, got {ratio!r}")
    return float(ratio)


def _bytes(budget: Any) -> int:
    if _is_integral(budget):
        size = int(budget)
    elif isinstance(budget, str):
        parts = _SIZE.fullmatch(budget)
        unit = _UNITS_BY_FOLDED_NAME.get(parts[2].lower()) if parts else None
        if parts is None or unit is None:
            units = ", ".join(name for name in _UNITS if name)
            raise ValueError(
                f"budget must be a number with one of the units {units} or none, got {budget!r}"
            )
        scaled = float(parts[1]) * unit
        size = int(scaled) if math.isfinite(scaled) else 0
    else:
        raise TypeError(f"budget must be an int of bytes or a string like '6GiB', got {budget!r}")
    if not 1 <= size < 2**63:
        raise ValueError(f"budget must be at least one byte and below 2**63, got {budget!r}")
    return size


def _of_level(level: Any, adaptive: bool) -> Target:
    if not isinstance(level, str):
        raise TypeError(f"level must be a string like 'L2', got {level!r}")
    if level in _REFUSED_LEVELS:
        missing, instead = _REFUSED_LEVELS[level]
        raise ValueError(
            f"level={level!r} needs {missing}, which Backfold does not have yet: "
            f"{instead!r} is the same without"
        )
    if level not in _LEVELS:
        levels = ", ".join((*_LEVELS, *_REFUSED_LEVELS))
        raise ValueError(f"level must be one of {levels}, got {level!r}")
    target = _LEVELS[level]
    if target.adaptive and not adaptive:
        raise ValueError(
            f"level={level!r} plans widths, which adaptive=False forbids: "
            "'L1', 'L1.1', 'L1.2' and 'actnn-L2' have one width everywhere"
        )
    return target


class ProbeSchedule(NamedTuple):
    """At which steps sensitivities are measured; the first step is 1."""

    steps: tuple[int, ...]
    every: int | None

    def due(self, step: int) -> bool:
        """Whether `step` is listed, or a whole number of periods after the last listed one.

        >>> schedule = probe_schedule((2, 100, 300, 1000), 1000)
        >>> [step for step in range(5000) if schedule.due(step)]
        [2, 100, 300, 1000, 2000, 3000, 4000]
        """
        last = self.steps[-1] if self.steps else 0
        if step <= last or self.every is None:
            return step in self.steps
        return (step - last) % self.every == 0


def probe_schedule(probe_steps: Iterable[int], probe_every: int | None) -> ProbeSchedule:
    if isinstance(probe_steps, str) or not isinstance(probe_steps, Iterable):
        raise TypeError(f"probe_steps must be a sequence of ints, got {probe_steps!r}")
    steps = tuple(probe_steps)
    for step in steps:
        if not _is_integral(step):
            raise TypeError(f"probe_steps must hold ints, got {step!r}")
        if step < 1:
            raise ValueError(f"probe_steps must be 1 or more, the first step's number, got {step}")
    if probe_every is not None and not _is_integral(probe_every):
        raise TypeError(f"probe_every must be an int or None, got {probe_every!r}")
    if probe_every is not None and probe_every < 1:
        raise ValueError(f"probe_every must be 1 or more, or None for never, got {probe_every}")
    every = None if probe_every is None else int(probe_every)
    return ProbeSchedule(tuple(sorted({int(step) for step in steps})), every)


def probe_share(probe_fraction: float) -> float:
    """The validated part of a batch that a probe runs on."""
    if not _is_real(probe_fraction):
        raise TypeError(f"probe_fraction must be a number, got {probe_fraction!r}")
    if not 0 < probe_fraction <= 1:
        raise ValueError(f"probe_fraction must be above 0 and at most 1, got {probe_fraction!r}")
    return float(probe_fraction)
