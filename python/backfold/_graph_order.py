# SPDX-License-Identifier: Apache-2.0
"""Where packing and unpacking stand in the graphs of torch.compile.

AOTAutograd puts what hooks return at the very end of the forward graph and at the very beginning of
the backward graph, where all tensors are alive at once: the peak would stay as it was.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

_PLACED = "backfold_placed"


def place(forward: Graph, backward: Graph) -> None:
    """Moves folds behind the last use of their tensors, and unfolds before the first.

    Called for each saved tensor, it finds those of the ones before. The last one stays where it is:
    it is among the last that forward makes and the first that backward reads.
    """
    ops = torch.ops.backfold
    for node in forward.find_nodes(op="call_function", target=ops.fold.default):
        if not node.meta.setdefault(_PLACED, False):
            node.meta[_PLACED] = True
            _move_up(node)
    for node in backward.find_nodes(op="call_function", target=ops.unfold.default):
        if not node.meta.setdefault(_PLACED, False):
            node.meta[_PLACED] = True
            _move_down(node)
            _take_ticket(node, backward)


def announce(backward: Graph, tensors: list[str], sizes: list[str], lasting: int) -> None:
    """Has a backward graph tell what it is given beside packets, of inputs with these names.

    The operator needs the ticket of one packet, which place() gives it once there is one.
    """
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    first = next(node for node in backward.nodes if node.op != "placeholder")
    given = [inputs[name] for name in tensors]
    with backward.inserting_before(first):
        node = backward.call_function(
            torch.ops.backfold.arrive.default,
            (given[0], given, [inputs[name] for name in sizes], lasting),
        )
    node.meta["val"] = given[0].meta["val"].new_empty(0)


def _take_ticket(unfold: Node, backward: Graph) -> None:
    for node in backward.find_nodes(op="call_function", target=torch.ops.backfold.arrive.default):
        if node.users:
            return
        ticket = unfold.args[0]
        node.update_arg(0, ticket)
        node.meta = {**ticket.meta}
        unfold.update_arg(0, node)


def _move_up(node: Node) -> None:
    uses = {user for source in node.all_input_nodes for user in source.users} - {node}
    uses.update(node.all_input_nodes)
    found = node.prev
    while found not in uses:
        found = found.prev
    found.append(node)


def _move_down(node: Node) -> None:
    found = node.next
    while found not in node.users and found.op != "output":
        found = found.next
    found.prepend(node)
