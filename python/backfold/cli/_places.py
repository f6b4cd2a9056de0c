# SPDX-License-Identifier: Apache-2.0
"""What is kept where: sites of reports, added up by module and operator."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from backfold.cli._trials import Outcome
from backfold.cli._watch import MODEL

OUTSIDE = "(outside of modules)"
WHOLE = "(model)"
# The remedies that a place is shown with.
SHOWN = ("exact", "8 bits", "4 bits", "2 bits")
# Of a repeated block, not of one layer among others.
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.)")


@dataclass
class Place:
    """Sites of one operator in modules whose paths differ only in the numbers of blocks."""

    module: str
    op: str
    saves: int = 0
    kept_bytes: int = 0  # by plain autograd
    held_bytes: dict[str, int] = field(default_factory=dict)  # by the remedy's name
    how: str = ""  # at 4 bits, of the largest site


def pattern_of(path: str) -> str:
    """
    >>> pattern_of("h.11.mlp.0"), pattern_of("conv2")
    ('h.*.mlp.0', 'conv2')
    """
    return _NUMBER.sub("*", path)


def _observed_path(path: str) -> str:
    if path == "":
        return OUTSIDE
    return WHOLE if path == MODEL else path.removeprefix(f"{MODEL}.")


def places(report: dict[str, Any], outcomes: Iterable[Outcome]) -> list[Place]:
    """Those of the observed pass, with what each remedy held there; largest first."""
    found: dict[tuple[str, str], Place] = {}

    def place(module: str, op: str) -> Place:
        key = pattern_of(module), op.removeprefix("aten::")
        return found.setdefault(key, Place(*key))

    for site in report["sites"]:
        if site["kind"] != "parameter":
            at = place(_observed_path(site["module"]), site["op"])
            at.saves += site["saves"]
            at.kept_bytes += site["held_bytes"]
    for outcome in outcomes:
        if outcome.failed or outcome.remedy.name not in SHOWN:
            continue
        largest: dict[int, int] = {}
        for site in outcome.sites:
            if site["kind"] == "parameter":
                continue
            at, name = place(site["module"] or WHOLE, site["op"]), outcome.remedy.name
            at.held_bytes[name] = at.held_bytes.get(name, 0) + site["held_bytes"]
            if name == "4 bits" and site["saved_bytes"] > largest.get(id(at), -1):
                largest[id(at)] = site["saved_bytes"]
                at.how = how_of(site)
    return sorted(found.values(), key=lambda one: (-one.kept_bytes, one.module, one.op))


def how_of(site: dict[str, Any]) -> str:
    """
    >>> how_of({"kind": "derived", "recipe": "gelu"})
    'derived by gelu'
    >>> how_of({"kind": "derived", "recipe": "mul, mul, tanh"})
    'derived by mul, 2 more'
    >>> how_of({"kind": "lossy", "bits": 3})
    'lossy, 3 bits'
    """
    if site["kind"] == "derived":
        first, *others = site["recipe"].split(", ")
        return f"derived by {first}, {len(others)} more" if others else f"derived by {first}"
    if site["kind"] in ("lossy", "zero-exact"):
        return f"{site['kind']}, {site['bits']} bit{'s' if site['bits'] > 1 else ''}"
    return site["kind"]
