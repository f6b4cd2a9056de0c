# SPDX-License-Identifier: Apache-2.0
"""Numbers and names as a reader wants them."""

from __future__ import annotations

import math
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: int | None) -> str:
    """
    >>> size(0), size(900), size(69632), size(1_502_000_000)
    ('0', '900 B', '68.0 KiB', '1.40 GiB')
    """
    if count is None:
        return "-"
    if count == 0:
        return "0"
    power = min(int(math.log(abs(count), 1024)), len(_UNITS) - 1)
    value = count / 1024**power
    if power == 0:
        return f"{count} B"
    digits = 0 if abs(value) >= 1000 else 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f} {_UNITS[power]}"


def number(value: float | None) -> str:
    """
    >>> number(0.25), number(1.2e-7), number(123456.0), number(None)
    ('0.25', '1.2e-07', '1.23e+05', '-')
    """
    return "-" if value is None else f"{value:.3g}"


def times(whole: int, part: int) -> str:
    """
    >>> times(100, 8), times(100, 0)
    ('12.5', '-')
    """
    return f"{whole / part:.1f}" if part else "-"


def operator(name: str) -> str:
    """
    >>> operator("aten::addmm")
    'addmm'
    """
    return name.removeprefix("aten::")


def place_name(site: dict[str, Any]) -> str:
    """
    >>> place_name({"module": "h.0", "op": "aten::addmm", "slot": "mat1", "occurrence": 1})
    'h.0 · addmm (mat1, 2)'
    """
    occurrence = f", {site['occurrence'] + 1}" if site["occurrence"] else ""
    module = f"{site['module']} · " if site["module"] else ""
    return f"{module}{operator(site['op'])} ({site['slot']}{occurrence})"


def source_name(source: str) -> str:
    """
    >>> source_name("h.0.c_fc.bias/aten::pow/self/0")
    'h.0.c_fc.bias · pow (self)'
    """
    parts = source.rsplit("/", 3)
    if len(parts) < 4:
        return source
    landmark, op, slot, occurrence = parts
    return place_name({"module": landmark, "op": op, "slot": slot, "occurrence": int(occurrence)})


FILTERS = {"size": size, "number": number, "source": source_name}
