# SPDX-License-Identifier: Apache-2.0
"""The places of a report as a tree: parts of the model, and the operators in each."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any

from backfold._page._families import ALIVE, family_of
from backfold._page._format import operator


@dataclasses.dataclass
class Node:
    """A part of the model, or an operator in one. Bytes include those of its children."""

    name: str
    id: str
    before: int = 0
    after: int = 0
    is_operator: bool = False
    children: list[Node] = dataclasses.field(default_factory=list)
    _families: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def family(self) -> str:
        """How most of its bytes are kept."""
        return self._families.most_common(1)[0][0] if self._families else ALIVE

    def add(self, site: dict[str, Any]) -> None:
        self.before += site["unique_bytes"]
        self.after += site["held_bytes"]
        self._families[family_of(site["kind"])] += max(site["unique_bytes"], site["held_bytes"])

    def child(self, name: str, id: str) -> Node:
        for child in self.children:
            if child.id == id:
                return child
        self.children.append(Node(name, id))
        return self.children[-1]


def grow(report: dict[str, Any]) -> Node:
    """The whole model. Parameters, which are there anyway, are left out."""
    root = Node("model", "")
    for site in report["sites"]:
        if site["kind"] == "parameter":
            continue
        node = root
        node.add(site)
        for part in filter(None, site["module"].split(".")):
            node = node.child(part, f"{node.id}.{part}" if node.id else part)
            node.add(site)
        leaf = node.child(operator(site["op"]), f"{node.id}|{site['op']}")
        leaf.add(site)
        leaf.is_operator = True
    _tidy(root)
    return root


def _tidy(node: Node) -> None:
    """Joins a part with its only part ("transformer.h"), and sorts by size."""
    while len(node.children) == 1 and not node.children[0].is_operator and node.id:
        only = node.children[0]
        node.name, node.id = f"{node.name}.{only.name}", only.id
        node.children = only.children
    for child in node.children:
        _tidy(child)
    node.children.sort(key=lambda child: (-child.before, _in_order(child.name)))


def _in_order(name: str) -> list[tuple[int, str]]:
    """
    >>> sorted(["h.10", "h.9"], key=_in_order)
    ['h.9', 'h.10']
    """
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
