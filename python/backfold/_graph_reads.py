# SPDX-License-Identifier: Apache-2.0
"""What the backward graph of torch.compile reads of a tensor that its forward graph saves.

A backward graph is linear in the gradient that enters it, so noise that has met the gradient stays
noise. What has to be looked at are the values on the way there: the graph makes some of them again
from what was saved, and may divide by them, compare them or exponentiate them. A tensor may be
rounded if all that happens to it before it meets the gradient is in the tables here; every other
operator, known or not, needs it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Node

from backfold._graph_nodes import elements, is_item, name_of, slots_of
from backfold._graph_norms import norm_of


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


# Copies of all elements, or of some, in any order: zeros stay zero.
_MOVES = _aten(
    "alias cat clone detach expand permute repeat reshape select slice split split_with_sizes "
    "squeeze stack t transpose unbind unsqueeze unsafe_split view _unsafe_view"
)
_CASTS = frozenset(("aten._to_copy", "prims.convert_element_type"))
# Linear in each of their tensors.
_LINEAR = _aten(
    "add addmm baddbmm bmm constant_pad_nd convolution convolution_backward mean mm mul neg rsub "
    "sub sum"
)
# Smooth functions whose slope is bounded.
_SMOOTH = _aten("cos erf gelu sigmoid silu sin tanh")
# Of operators that are linear or smooth in some arguments alone: which, and the fewest bits.
_ARGUMENTS = {
    "aten.div": {"self": 0},
    "aten.where": {"self": 0, "other": 0},
    "aten.gelu_backward": {"self": 0},
    "aten.silu_backward": {"self": 0},
    "aten.tanh_backward": {"output": 0},
    "aten.sigmoid_backward": {"output": 0},
    "aten._softmax_backward_data": {"output": 6},
    "aten._log_softmax_backward_data": {"output": 6},
    "aten.native_layer_norm_backward": {"input": 0},
    "aten.native_group_norm_backward": {"input": 0},
    "aten.native_batch_norm_backward": {"input": 0},
    "aten.batch_norm_backward": {"input": 0},
    "aten.cudnn_batch_norm_backward": {"input": 0},
    "aten._fused_rms_norm_backward": {"input": 0},
} | {
    f"aten._scaled_dot_product_{name}_backward": {"query": 6, "key": 6, "value": 0, "out": 0}
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention")
}
# Element by element.
_BROADCASTS = _aten("add div expand mul rsub sub where")
# What makes the statistics of norms and of softmax.
_STATISTICS = _aten(
    "amax amin linalg_vector_norm log logsumexp max mean min norm reciprocal rsqrt sqrt std "
    "std_mean sum var var_mean"
)
_COMPARISONS = _aten("eq gt le ne")


_CANCELS = "a norm over so few values cancels all but noise"


@dataclass(frozen=True)
class Reading:
    """How a tensor may be kept for its readers."""

    exactly: str = ""  # why it must not be rounded; empty if it may be
    floor: int = 0  # the fewest bits
    sign: bool = False  # some reader asks whether an element is zero


def reading_of(saved: Node, after_gradient: Callable[[Node], bool]) -> Reading:
    """Reads the graph from `saved`, one of its placeholders, to where the gradient comes in.

    `after_gradient` says whether a node depends on the gradient that enters the graph.
    """
    floor, sign, cancels = 0, False, False
    seen = {saved}
    todo = [(saved, True)]  # and whether it is nothing but a copy of the saved one
    while todo:
        value, copied = todo.pop()
        for reader in value.users:
            if reader.op == "output":
                continue  # it is a gradient itself, as of a product with a constant
            if copied and _asks_for_zeros(reader, value):
                sign = True
                continue
            needed = _bits_needed(reader, value)
            if needed is None:
                return Reading(exactly=f"{name_of(reader)} in backward reads it")
            norm = norm_of(reader, value) if copied else None
            cancels |= norm is not None and norm.values < 32
            floor = max(floor, needed, norm.floor if norm else 0)
            if after_gradient(reader) or reader in seen:
                continue
            seen.add(reader)
            todo.append((reader, copied and (name_of(reader) in _MOVES or is_item(reader))))
    return Reading(_CANCELS if cancels else "", floor, sign)


def origin_of(node: Node, casts: bool = True) -> Node:
    """What a node is a copy of, in part or as a whole, and in another type if `casts`."""
    copies = _MOVES | _CASTS if casts else _MOVES
    while len(node.all_input_nodes) == 1:
        source = node.all_input_nodes[0]
        if name_of(node) not in copies and not (is_item(node) and name_of(source) in _MOVES):
            break
        node = source
    return node


def making_of(node: Node) -> Reading:
    """What the forward graph says of a tensor: statistics are not rounded, whoever reads them."""
    origin = origin_of(node)
    if is_item(origin):
        if origin.args[1] > 0:
            return Reading(exactly="a further result of an operator, such as a statistic")
        origin = origin.args[0]
    if name_of(origin) in _STATISTICS:
        return Reading(exactly="a statistic that backward scales every element with")
    if name_of(origin) == "aten._softmax":
        return Reading(floor=6)
    if name_of(origin) == "aten.div" and name_of(origin.args[0]) == "aten.exp":
        return Reading(floor=6)  # the same, taken apart
    return Reading()


def _bits_needed(reader: Node, value: Node) -> int | None:
    """The fewest bits with which the reader can do; None if it needs the value exactly."""
    name = name_of(reader)
    if name in _BROADCASTS and elements(value) != elements(reader):
        return None  # it scales or shifts many elements alike
    if name in _MOVES or name in _LINEAR or name in _SMOOTH or is_item(reader):
        return 0
    if name in _CASTS:
        return 0 if reader.meta["val"].dtype.is_floating_point else None
    if name == "aten.pow":
        whole = reader.args[0] is value and reader.args[1] in (1, 2, 3)
        return 0 if whole and value not in reader.args[1:] else None
    if name == "aten.exp":
        return 0 if _is_gaussian(reader) or _is_logistic(reader) else None
    if name == "aten.reciprocal":
        return 0 if _is_one_plus_exponential(reader.args[0]) else None
    if name == "aten.div" and reader.args[1] is value:
        return 0 if _is_one_plus_exponential(value) else None
    allowed = _ARGUMENTS.get(name)
    if allowed is None or _has_large_logits(reader):
        return None
    floors = [allowed.get(slot) for slot, argument in slots_of(reader) if argument is value]
    return None if not floors or None in floors else max(floors)


def _is_gaussian(node: Node) -> bool:
    """Whether it is exp(-c * x * x), as in the derivative of GELU."""
    product = node.args[0]
    if name_of(product) != "aten.mul":
        return False
    square, factor = product.args
    if not isinstance(square, Node) or not isinstance(factor, (int, float)) or factor >= 0:
        return False
    if name_of(square) == "aten.pow":
        return square.args[1] == 2
    return name_of(square) == "aten.mul" and square.args[0] is square.args[1]


def _is_logistic(node: Node) -> bool:
    """Whether an exponential is used for 1 / (1 + exp(x)) alone, as in SiLU."""
    sums = list(node.users)
    return bool(sums) and all(
        _is_one_plus_exponential(one)
        and all(
            name_of(user) == "aten.reciprocal"
            or (name_of(user) == "aten.div" and user.args[1] is one and user.args[0] is not one)
            for user in one.users
        )
        for one in sums
    )


def _is_one_plus_exponential(node: object) -> bool:
    if not isinstance(node, Node) or name_of(node) != "aten.add" or len(node.args) != 2:
        return False
    left, right = node.args
    if isinstance(right, Node):
        left, right = right, left
    return isinstance(left, Node) and name_of(left) == "aten.exp" and right == 1 and not node.kwargs


def _has_large_logits(node: Node) -> bool:
    """Whether attention does not divide its logits by the square root of the head's size."""
    if "attention" not in name_of(node):
        return False
    slots = dict(slots_of(node))
    scale, query = slots.get("scale"), slots.get("query")
    if scale is None:
        return False
    size = query.meta["val"].shape[-1]
    if not isinstance(scale, (int, float)) or not isinstance(size, int):
        return True
    return scale * math.sqrt(size) > 2


def _asks_for_zeros(reader: Node, value: Node) -> bool:
    name = name_of(reader)
    if name in _COMPARISONS:
        return reader.args[0] is value and reader.args[1] == 0
    if name == "aten.threshold_backward":
        return reader.args[1] is value and reader.args[0] is not value and reader.args[2] == 0
    return False
