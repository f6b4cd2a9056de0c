# SPDX-License-Identifier: Apache-2.0
"""Norms in the backward graphs of torch.compile, as operators or taken apart."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch.fx import Node

from backfold._graph_nodes import elements, hint, name_of, slots_of

_GROUP = 128  # elements that share a step


class Norm(NamedTuple):
    """What a norm does to its input."""

    values: int  # that share a statistic
    run: int  # of them, neighbours in memory

    @property
    def floor(self) -> int:
        """The fewest bits: where a group holds rows of several scales, the smallest suffers."""
        return 0 if self.run % _GROUP == 0 or self.run >= 8 * _GROUP else 8


def norm_of(reader: Node, value: Node) -> Norm | None:
    """The norm that a reader is, or is the first step of, of one of its arguments."""
    sizes = [hint(size) or 0 for size in value.meta["val"].shape]
    count = elements(value)
    if name_of(reader) in ("aten.sub", "aten.mul"):
        for other in reader.all_input_nodes:
            shape = [hint(size) or 0 for size in other.meta["val"].shape]
            if other is value or len(shape) != len(sizes) or math.prod(shape) in (1, count):
                continue
            run = 1
            for size, of_statistic in zip(reversed(sizes), reversed(shape), strict=True):
                if of_statistic != 1:
                    break
                run *= size
            return Norm(count // max(math.prod(shape), 1), run)
        return None
    slots = dict(slots_of(reader)) if name_of(reader).endswith("norm_backward") else {}
    for name in ("rstd", "save_invstd", "save_var"):
        statistic = slots.get(name)
        if isinstance(statistic, Node) and slots.get("input") is value:
            values = count // max(elements(statistic) or 1, 1)
            by_channel = "batch_norm" in name_of(reader)
            return Norm(values, math.prod(sizes[2:]) if by_channel else values)
    return None
