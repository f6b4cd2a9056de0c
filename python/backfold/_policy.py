# SPDX-License-Identifier: Apache-2.0
"""The user's choice of codecs as an ordered list of rules, and the modules each applies to."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from backfold.codecs import Codec, Where


class Rule(NamedTuple):
    where: Where
    codec: Codec

    def for_core(self) -> tuple[str, dict[str, Any], bool, str, torch.dtype | None, int]:
        """Codec and arguments; whether modules are selected; operator, type, size."""
        where = self.where
        arguments = dataclasses.asdict(self.codec)
        placed = where.module is not None
        name = type(self.codec).__name__
        return name, arguments, placed, where.op or "", where.dtype, where.min_bytes


def rules_of(codec: Codec | Mapping[Any, Codec] | None) -> list[Rule]:
    """The rules that ``codec=`` stands for, in order.

    >>> from backfold.codecs import Pool, Quantize
    >>> [rule.codec for rule in rules_of({"features.*": Pool(2), torch.float32: Quantize(2)})]
    [Pool(block=2), Quantize(bits=2, per_sample=False)]
    """
    if codec is None:
        return []
    if isinstance(codec, Codec):
        return [Rule(Where(), codec)]
    if not isinstance(codec, Mapping):
        raise TypeError(
            f"codec must be a codec or a mapping from selectors to codecs, got {codec!r}"
        )
    rules = []
    for selector, value in codec.items():
        if not isinstance(value, Codec):
            raise TypeError(f"codec: the value for {selector!r} must be a codec, got {value!r}")
        rules.append(Rule(Where.of(selector), value))
    return rules


def menu_of(menu: Iterable[Codec]) -> list[tuple[str, dict[str, Any]]]:
    """The codecs of ``menu=`` and their arguments."""
    codecs = [menu] if isinstance(menu, Codec) else list(menu)
    for codec in codecs:
        if not isinstance(codec, Codec):
            raise TypeError(f"menu must hold codecs of backfold.codecs, got {codec!r}")
    return [(type(codec).__name__, dataclasses.asdict(codec)) for codec in codecs]


def paths_within(modules: Iterable[str], roots: Iterable[str]) -> set[str]:
    """The paths among `modules` that are in `roots` or inside of one of them."""
    roots = tuple(roots)
    return {
        path
        for path in modules
        if any(not root or path == root or path.startswith(root + ".") for root in roots)
    }


def places(rules: list[Rule], modules: dict[str, torch.nn.Module]) -> dict[str, int]:
    """By path: the bit set of rules that select the module or one that contains it."""
    found = dict.fromkeys(modules, 0)
    for number, rule in enumerate(rules):
        wanted = rule.where.module
        if wanted is None:
            continue
        if isinstance(wanted, str):
            roots = fnmatch.filter(modules, wanted)
        else:
            roots = [path for path, module in modules.items() if isinstance(module, wanted)]
        for path in paths_within(modules, roots):
            found[path] |= 1 << number
    return found


def warn_of_unmatched(rules: list[Rule], matched: list[bool]) -> None:
    """Warns about selectors that matched no saved tensor of the first step."""
    found = zip(rules, matched, strict=True)
    idle = [rule.where for rule, seen in found if not seen]
    if idle:
        names = ", ".join(map(repr, idle))
        warnings.warn(
            f"backfold: codec: no tensor saved in the first step matches {names}", stacklevel=3
        )
