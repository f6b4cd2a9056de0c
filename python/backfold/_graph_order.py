# SPDX-License-Identifier: Apache-2.0
"""Where packing and unpacking stand in the graphs of torch.compile.

AOTAutograd puts what hooks return at the very end of the forward graph and at the very beginning of
the backward graph, where all tensors are alive at once: the peak would stay as it was.
"""

from __future__ import annotations

from torch.fx import Graph, Node

_PLACED = "backfold_placed"


def place(forward: Graph, backward: Graph, fold: object, unfold: object) -> None:
    """Moves folds behind the last use of their tensors, and unfolds before the first.

    Called for each saved tensor, it finds those of the ones before. The last one stays where it is:
    it is among the last that forward makes and the first that backward reads.
    """
    for node in forward.find_nodes(op="call_function", target=fold):
        if not node.meta.setdefault(_PLACED, False):
            node.meta[_PLACED] = True
            _move_up(node)
    for node in backward.find_nodes(op="call_function", target=unfold):
        if not node.meta.setdefault(_PLACED, False):
            node.meta[_PLACED] = True
            _move_down(node)


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
