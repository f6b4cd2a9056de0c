# SPDX-License-Identifier: Apache-2.0
"""The user's options for memory and probes. Types are checked here, values by the core."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Final, NamedTuple

from backfold import _C


class Unset(enum.Enum):
    """Marks an argument that was left out, where None is a value."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class Target(NamedTuple):
    """How much to keep: a mean width, a ratio, a number of bytes, or only what is exact."""

    kind: str  # "bits", "ratio", "budget", "peak" or "exact"
    value: float
    adaptive: bool


def target_options(
    bits: float | Unset | None = UNSET,
    ratio: float | None = None,
    budget: int | str | None = None,
    level: str | None = None,
    adaptive: bool = True,
    peak: int | str | None = None,
) -> dict[str, Any]:
    """The core's options for the one target that the arguments set."""
    if not isinstance(adaptive, bool):
        raise TypeError(f"adaptive must be True or False, got {adaptive!r}")
    given = {
        name: value
        for name, value, default in (
            ("bits", bits, UNSET),
            ("ratio", ratio, None),
            ("budget", budget, None),
            ("peak", peak, None),
            ("level", level, None),
        )
        if value is not default
    }
    # Kept without rounding.
    exact = bits is None and not {"ratio", "budget", "peak"}.isdisjoint(given)
    if len(given) - exact > 1:
        both = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{both} cannot be given together: each sets how much is kept")
    checks = {
        "bits": _bits,
        "ratio": _ratio,
        "budget": lambda value: byte_count("budget", value),
        "peak": lambda value: byte_count("peak", value),
        "level": _level,
    }
    checked = {name: checks[name](value) for name, value in given.items()}
    return {**checked, "adaptive": adaptive}


def target_of(**arguments: Any) -> Target:
    """The one target that the arguments of target_options() set; 4 bits if they set none.

    >>> target_of(bits=3.5)
    Target(kind='bits', value=3.5, adaptive=True)
    >>> target_of(budget="6 GiB")
    Target(kind='budget', value=6442450944.0, adaptive=True)
    """
    return Target(*_C.target_of(target_options(**arguments)))


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integral(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _bits(bits: Any) -> float | None:
    if bits is None:
        return None
    if not _is_real(bits):
        raise TypeError(f"bits must be a number from 1 to 16 or None, got {bits!r}")
    return float(bits)


def _ratio(ratio: Any) -> float:
    if not _is_real(ratio):
        raise TypeError(f"ratio must be a number above 1, got {ratio!r}")
    return float(ratio)


def byte_count(name: str, value: Any) -> int:
    """The bytes that an argument of that name asks for."""
    if isinstance(value, str):
        return _C.parse_bytes(value, name)
    if not _is_integral(value):
        raise TypeError(
            f"{name} must be a number of bytes, an int, or a string like '6GiB', got {value!r}"
        )
    if not 1 <= int(value) < 2**63:
        raise ValueError(f"{name} must be at least one byte and below 2**63, got {value!r}")
    return int(value)


def _level(level: Any) -> str:
    if not isinstance(level, str):
        raise TypeError(f"level must be a string like 'L2', got {level!r}")
    if not level:
        raise ValueError("level must be a name like 'L2', got ''")
    return level


def probe_options(
    probe_steps: Iterable[int], probe_every: int | None, probe_fraction: float
) -> dict[str, Any]:
    """The core's options for when, and on what part of the batch, sensitivities are measured."""
    if isinstance(probe_steps, str) or not isinstance(probe_steps, Iterable):
        raise TypeError(f"probe_steps must be a sequence of ints, got {probe_steps!r}")
    steps = tuple(probe_steps)
    for step in steps:
        if not _is_integral(step):
            raise TypeError(f"probe_steps must hold ints, got {step!r}")
    if probe_every is not None and not _is_integral(probe_every):
        raise TypeError(f"probe_every must be an int or None, got {probe_every!r}")
    if not _is_real(probe_fraction):
        raise TypeError(f"probe_fraction must be a number, got {probe_fraction!r}")
    return {
        "probe_steps": [int(step) for step in steps],
        "probe_every": None if probe_every is None else int(probe_every),
        "probe_fraction": float(probe_fraction),
    }
