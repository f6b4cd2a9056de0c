# SPDX-License-Identifier: Apache-2.0
"""Folding inside the graphs of torch.compile.

While a block is open, autograd's stack of hooks has a pair of GraphModules on top. Dynamo guards on
their identity, so that a graph which folds runs inside of blocks alone. When AOTAutograd has cut a
graph into forward and backward, it calls them for each tensor between the two, with both graphs at
hand, and what they return becomes part of the graphs.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule, Node

from backfold import _C
from backfold._graph_borders import are_parameters, is_anyones, is_input, is_output
from backfold._graph_nodes import hint
from backfold._graph_order import announce, place
from backfold._graph_reads import Reading, making_of, origin_of, reading_of

# Keys in the meta data of a node.
_WHY = "backfold"  # the decision
_SEEN = "backfold_seen"


class Rules(NamedTuple):
    """What graphs are compiled with: a pair of hooks for each."""

    rounds: bool  # or folds only what is exact
    measures: bool
    offloads: bool
    min_bytes: int
    kept: tuple[str, ...]  # paths of modules


class Decision(NamedTuple):
    """How one saved tensor is kept: folded, or for a reason as it is."""

    folds: bool = False
    exactly: bool = False  # every bit, to be sent away
    floor: int = 0  # bits
    zero_exact: bool = False
    order: tuple[int, ...] = ()  # of its dimensions in memory, the outermost first
    dtype: torch.dtype = torch.float32
    graph: int = 0
    module: str = ""
    name: str = ""
    reason: str = ""


def graph_hooks(
    rules: tuple[bool, bool, bool, int] | None, kept: tuple[str, ...]
) -> tuple[GraphModule, GraphModule] | None:
    """The pair for a controller; None where graphs are left as they are."""
    # To import a compiler takes seconds, and most programs have no use for one.
    if rules is None or ("torch._dynamo" in sys.modules and _saved_tensor() is None):
        return None
    return _pair(Rules(*rules, kept))


def program_compiles() -> bool:
    """Whether torch.compile was called since the compiler was last reset."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return any(backend is not None for backend in getattr(module, "cached_backends", {}).values())


@functools.cache  # for good: guards know the pair by its address
def _pair(rules: Rules) -> tuple[GraphModule, GraphModule]:
    return _module(fold_saved, rules), _module(unfold_saved, rules)


def _module(function: Any, rules: Rules) -> GraphModule:
    graph = Graph()
    value = graph.placeholder("value")
    graph.output(graph.call_function(function, (value, *rules)))
    return GraphModule(torch.nn.Module(), graph)


@functools.cache
def _saved_tensor() -> Any:
    """torch's function that tells which tensor hooks are called for; None if it has none."""
    try:
        from torch._functorch._aot_autograd import graph_compile

        return graph_compile._get_saved_tensor_hook_context
    except (ImportError, AttributeError):
        return None


def fold_saved(value: torch.Tensor, *rules: Any) -> Any:
    """Stands at the end of a forward graph, for one saved tensor."""
    context = _saved_tensor()()
    node = context["_node"]
    try:
        decision = node.meta.get(_WHY) or _decided(context, Rules(*rules))[node]
        if not node.meta.setdefault(_SEEN, False):
            node.meta[_SEEN] = True
            place(context["_fw_graph"], context["_bw_graph"])
    except Exception as error:  # of a torch whose graphs are not as they were
        warnings.warn(
            f"backfold: what a graph of torch.compile saves is kept as it is: {error!r}",
            stacklevel=2,
        )
        decision = Decision()
    node.meta[_WHY] = decision
    where = (decision.module, decision.name)
    if decision.folds:
        stride = _strides(value.shape, decision.order)
        ticket = torch.ops.backfold.fold.default(
            value,
            stride,
            decision.floor,
            decision.zero_exact,
            decision.exactly,
            decision.graph,
            *where,
        )
        return ticket, list(value.shape), stride
    if decision.reason:
        return value, torch.ops.backfold.keep.default(value, *where, decision.reason)
    return (value,)


def unfold_saved(packed: Any, *rules: Any) -> torch.Tensor:
    """Stands at the beginning of a backward graph."""
    decision = _saved_tensor()()["_node"].meta[_WHY]
    if not decision.folds:
        return packed[0]
    ticket, size, stride = packed
    return torch.ops.backfold.unfold.default(ticket, size, stride, decision.dtype)


_decisions: WeakKeyDictionary[Graph, dict[Node, Decision]] = WeakKeyDictionary()


def _decided(context: dict[str, Any], rules: Rules) -> dict[Node, Decision]:
    """Decides about all tensors between two graphs when the first of them is asked for."""
    forward, backward = context["_fw_graph"], context["_bw_graph"]
    known = _decisions.get(forward)
    if known is None:
        _align_names(context)
        read = {node.name for node in backward.find_nodes(op="placeholder")}
        saved = [
            node
            for node in dict.fromkeys(forward.output_node().args[0])
            if isinstance(node, Node) and node.name in read
        ]
        known = {
            node: _decide(node, forward, backward, rules)
            for node in saved
            if isinstance(node.meta["val"], torch.Tensor)
        }
        if rules.measures:
            number = _measured(known, forward, backward)
            known = {node: one._replace(graph=number) for node, one in known.items()}
        _decisions[forward] = known
    return known


def _measured(decisions: dict[Node, Decision], forward: Graph, backward: Graph) -> int:
    """Has a pair of graphs recorded when it runs. Returns its number; 0 if it cannot be."""
    from backfold._graph_measured import MeasuredGraph  # takes a part of the compiler

    folded = {node.name for node, one in decisions.items() if one.folds and not one.exactly}
    inputs = backward.find_nodes(op="placeholder")
    if len(folded) < 2 or not all(
        isinstance(node.meta.get("val"), (torch.Tensor, int, torch.SymInt)) for node in inputs
    ):
        return 0
    measured = MeasuredGraph(backward, folded, are_parameters(forward, backward))
    announce(backward, measured.tensors, measured.sizes, measured.lasting)
    return measured.number


def _decide(node: Node, forward: Graph, backward: Graph, rules: Rules) -> Decision:
    value, module = node.meta["val"], _module_of(node)
    folds, exactly, floor, zero_exact, reason = False, False, 0, False, ""
    leaves = rules.offloads
    size = _bytes_of(value)
    if size is None:
        reason = "of a size that is not known when the graph is compiled"
    elif size < rules.min_bytes:
        leaves = False  # not worth a note
    elif any(hint(stride) == 0 for stride in value.stride()):
        leaves, reason = False, "expanded"
    elif module in rules.kept:
        leaves, reason = False, "named in keep="
    elif is_anyones(node, forward, backward):
        leaves = False
        reason = "" if is_input(origin_of(node, casts=False)) else "a copy of a parameter"
    elif is_output(node, forward, backward):
        leaves = False  # whoever asked for it has it
    elif value.dtype == torch.bool:
        folds = True
    elif value.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        reason = f"no codec for {value.dtype} in a compiled graph"
    elif not rules.rounds:
        reason = "bits=None folds only what is exact"
    else:
        making, reading = making_of(node), _reading(node, backward)
        zero_exact, reason = reading.sign, making.exactly or reading.exactly
        if reading.sign and not _is_never_negative(node):
            reason = "backward compares it"
        folds, floor = not reason, max(making.floor, reading.floor)
    if leaves and reason and size is not None and size >= _C.LEAST_OFFLOADED:
        folds = exactly = True
    if node.op == "placeholder":
        reason = ""  # AOTAutograd allows no second result beside an input
    strides = [hint(stride) for stride in value.stride()]
    order = tuple(sorted(range(value.dim()), key=lambda dimension: -(strides[dimension] or 0)))
    return Decision(
        folds, exactly, floor, zero_exact, order, value.dtype, 0, module, node.name, reason
    )


def _align_names(context: dict[str, Any]) -> None:
    """Gives saved states of generators the names that the backward graph has for them.

    AOTAutograd finds the tensor that it calls hooks for by its name there, and has two for these.
    """
    forward, backward = context["_fw_graph"], context["_bw_graph"]
    made = [node for node in forward.output_node().args[0] if isinstance(node, Node)]
    read = backward.find_nodes(op="placeholder")
    names = {node.name for node in made}
    states = [node for node in read if "rng_state" in node.name and node.name not in names]
    names = {node.name for node in read}
    unread = [node for node in made if node.name not in names]
    for node, state in zip(unread[len(unread) - len(states) :], states, strict=False):
        node._rename(state.name)


def _reading(node: Node, backward: Graph) -> Reading:
    for placeholder in backward.find_nodes(op="placeholder"):
        if placeholder.name == node.name:
            return reading_of(placeholder, _nodes_after_gradient(backward).__contains__)
    return Reading(exactly="backward does not name it")


_after_gradient: WeakKeyDictionary[Graph, set[Node]] = WeakKeyDictionary()


def _nodes_after_gradient(backward: Graph) -> set[Node]:
    """The nodes that depend on a gradient that enters the graph."""
    known = _after_gradient.get(backward)
    if known is None:
        known = set()
        for node in backward.nodes:
            if node.op == "placeholder":
                if "tangents" in str(node.target):
                    known.add(node)
            elif any(one in known for one in node.all_input_nodes):
                known.add(node)
        _after_gradient[backward] = known
    return known


def _is_never_negative(node: Node) -> bool:
    origin = origin_of(node, casts=False)
    return str(origin.target) == "aten.relu.default"


def _module_of(node: Node) -> str:
    """The path of the innermost module that the block's controller knows."""
    stack = node.meta.get("nn_module_stack") or {}
    for key in reversed(stack):
        digits = str(key).split("@")[0]
        path = _C.module_path(int(digits)) if digits.isdigit() else None
        if path is not None:
            return path
    return ""


def _bytes_of(value: torch.Tensor) -> int | None:
    """Of memory that it fills, not counting dimensions that are expanded."""
    count = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        known = hint(size)
        if known is None:
            return None
        count *= 1 if hint(stride) == 0 else known
    return count * value.element_size()


def _strides(shape: torch.Size, order: tuple[int, ...]) -> list[Any]:
    """Of memory without gaps."""
    strides: list[Any] = [1] * len(order)
    stride: Any = 1
    for dimension in reversed(order):
        strides[dimension] = stride
        stride = stride * shape[dimension]
    return strides
