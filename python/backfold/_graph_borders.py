# SPDX-License-Identifier: Apache-2.0
"""What passes from one graph of torch.compile, or from eager code, to the next."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, Node

from backfold._graph_nodes import name_of
from backfold._graph_reads import origin_of

_MODE = "saved_tensors_hooks_filtering_mode"
_open = threading.local()  # shapes: of the parameters of the block's model


def open_borders(shapes: set[torch.Size]) -> tuple[bool, set[torch.Size]]:
    """Has AOTAutograd call hooks for inputs and results of graphs, too.

    By default it does so only for what is born and dies inside of a graph. Returns what
    close_borders() needs.
    """
    config = sys.modules.get("torch._functorch.config")
    closed = getattr(config, _MODE, None) == "donated"
    if closed:
        setattr(config, _MODE, "no_static")
    before = getattr(_open, "shapes", set())
    _open.shapes = shapes
    return closed, before


def close_borders(closed: bool, before: set[torch.Size]) -> None:
    """Undoes open_borders()."""
    _open.shapes = before
    if closed:
        setattr(sys.modules["torch._functorch.config"], _MODE, "donated")


def is_input(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def is_anyones(node: Node, forward: Graph, backward: Graph) -> bool:
    """Whether a tensor is data or a parameter, or as cheap to make of one: the program has them.

    Inputs that are neither were made by the forward pass, and nobody else needs them. Data have no
    gradient. Parameters do; AOTAutograd leaves out those that it knows, and what has the shape of
    one of the model's is taken for one. An input that the graph writes to is left alone.
    """
    origin = origin_of(node)
    if not is_input(origin):
        return False
    inputs = forward.find_nodes(op="placeholder")
    gradients = backward.output_node().args[0]
    if origin.op != "placeholder" or len(gradients) != len(inputs):
        return True
    if gradients[inputs.index(origin)] is None or _is_parameter(origin):
        return True
    return any(name_of(user).endswith("_") for user in origin.users)


def are_parameters(forward: Graph, backward: Graph) -> list[bool]:
    """Which results of a backward graph are gradients of the model's parameters."""
    inputs = forward.find_nodes(op="placeholder")
    gradients = backward.output_node().args[0]
    if len(gradients) != len(inputs):
        return [isinstance(one, Node) and _is_parameter(one) for one in gradients]
    return [_is_parameter(one) for one in inputs]


def _is_parameter(node: Node) -> bool:
    """Whether it has the shape of one."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or any(not isinstance(one, int) for one in value.shape):
        return False
    return value.shape in _open.shapes


_results: WeakKeyDictionary[Graph, set[Node]] = WeakKeyDictionary()


def is_output(node: Node, forward: Graph, backward: Graph) -> bool:
    """Whether the graph returns a tensor or a view of it: whoever asked for it has it, too."""
    known = _results.get(forward)
    if known is None:
        # Of what the forward graph ends with, the backward graph reads what was saved.
        read = {placeholder.name for placeholder in backward.find_nodes(op="placeholder")}
        made = Counter(one for one in forward.output_node().args[0] if isinstance(one, Node))
        results = [one for one, times in made.items() if times > 1 or one.name not in read]
        known = _results[forward] = {origin_of(one, casts=False) for one in results}
    return origin_of(node, casts=False) in known
