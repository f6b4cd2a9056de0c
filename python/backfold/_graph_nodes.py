# SPDX-License-Identifier: Apache-2.0
"""What is asked of the nodes of a graph of torch.compile."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node


def hint(size: int | torch.SymInt) -> int | None:
    """A size at the call that the graph is compiled for, without a guard on it."""
    return size if isinstance(size, int) else size.node.hint


def elements(node: Node) -> int | None:
    """At the call that the graph is compiled for, without a guard on it."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return None
    count = value.numel()
    return count if isinstance(count, int) else count.node.hint


def name_of(node: object) -> str:
    """The operator of a node, without its overload."""
    target = getattr(node, "target", node)
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))


def is_item(node: Node) -> bool:
    return node.target is operator.getitem


def slots_of(node: Node) -> list[tuple[str, object]]:
    """The arguments of a node with the names that the operator's schema has for them."""
    names = [argument.name for argument in node.target._schema.arguments]
    found = list(zip(names, node.args, strict=False)) + list(node.kwargs.items())
    return [
        (name, one)
        for name, argument in found
        for one in (argument if isinstance(argument, (list, tuple)) else (argument,))
    ]
