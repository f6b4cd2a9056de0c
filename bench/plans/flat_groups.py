# SPDX-License-Identifier: Apache-2.0
"""The peer: flat groups of 256 and a plan from exact sensitivities, as in GACT's paper.

It rounds the tensors that Backfold rounds and leaves exact what Backfold leaves exact, so the two
can be compared at equal bytes. What each tensor adds to the error is measured by folding it alone.
This yields two plans: one by the paper's formula, which measures at 4 bits and scales by
(2^bits - 1)^-2, and one by a table measured at 1, 2 and 4 bits. Two things work in its favour: a
tensor that is saved several times is kept once, and its header takes 32 bits per group where GACT's
takes 64 in fp32.
"""

import heapq
import math
import typing
from collections.abc import Iterator

import backfold
import torch
from cases import Case
from errors import Gradient, distance
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

GROUP = 256
WIDTHS = [1, 2, 3, 4, 5, 6, 8]
MEASURED = [1, 2, 4]
DRAWS = 2  # at each of them

Table = list[dict[int, float]]  # by place, then by width: the error of folding that place alone


def saved_attributes(loss: Tensor) -> Iterator[tuple[int, Node, str]]:
    """What the nodes of a graph saved, in an order that depends only on its shape."""
    nodes: list[Node] = [loss.grad_fn]
    known = {loss.grad_fn}
    for number, node in enumerate(nodes):  # grows meanwhile
        for name in sorted(dir(node)):
            if name.startswith("_saved_"):
                yield number, node, name
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                nodes.append(following)


def rounded_saves(case: Case, fold: backfold.Controller) -> set[int]:
    """Which saves of a forward pass, counted from 0, come back from `fold` with changed values."""
    sources: list[Tensor] = []
    asked: list[int] = []

    def pack(tensor: Tensor) -> int:
        sources.append(tensor.detach())
        return len(sources) - 1

    def unpack(number: int) -> Tensor:
        asked.append(number)
        return sources[number]

    with saved_tensors_hooks(pack, unpack):
        plain = case.loss()
    saves: dict[tuple[int, str], int] = {}
    for number, node, name in saved_attributes(plain):
        asked.clear()
        if isinstance(getattr(node, name), Tensor) and asked:  # numbers never pass a hook
            saves[number, name] = asked[0]

    with fold:
        folded = case.loss()
    rounded = set()
    for number, node, name in saved_attributes(folded):
        if (number, name) not in saves:
            continue
        save = saves[number, name]
        try:
            value = getattr(node, name)
        except RuntimeError:  # only its sign or its sizes were kept, for its own backward
            continue
        if not torch.equal(value.nan_to_num(), sources[save].nan_to_num()):
            rounded.add(save)
    return rounded


class Kept(typing.NamedTuple):
    """What one save keeps: memory or a packet that other saves may share, and its own geometry."""

    values: typing.Any
    shape: torch.Size
    stride: tuple[int, ...]


class FlatGroups:
    """Folds the given saves of a forward pass inside its block, rounding afresh at each entry."""

    def __init__(self, rounded: set[int]):
        self.rounded = rounded
        self.widths: dict[int, int] = {}  # by place; a place without one stays exact
        self.elements: list[int] = []  # by place, of the last entry
        self._seed = 0

    def __enter__(self) -> None:
        self._seed += 1
        self._count = 0
        self._places: dict[tuple, typing.Any] = {}
        self._sources: list[Tensor] = []  # kept alive, so that no address is reused
        self.elements = []
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        self._places.clear()
        self._sources.clear()

    def _pack(self, tensor: Tensor) -> Tensor | Kept:
        save, self._count = self._count, self._count + 1
        if save not in self.rounded:
            return tensor.detach()
        span = 1 + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        dense = tensor if span == tensor.numel() else tensor.contiguous()
        key = (
            tensor.data_ptr(),
            tensor.numel(),
            tensor._version,
            dense is tensor or tensor.stride(),
        )
        if key not in self._places:
            place = len(self._places)
            values = dense.detach().as_strided((dense.numel(),), (1,))
            self._sources.append(tensor.detach())
            self.elements.append(values.numel())
            if place in self.widths:
                values = backfold.pack(
                    values, self.widths[place], group=GROUP, seed=self._seed, stream=place
                )
            self._places[key] = values
        return Kept(self._places[key], dense.shape, dense.stride())

    @staticmethod
    def _unpack(kept: Tensor | Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        exact = isinstance(kept.values, Tensor)
        values = kept.values if exact else backfold.unpack(kept.values)
        return values.as_strided(kept.shape, kept.stride)


def stored_bytes(elements: int, bits: int) -> int:
    return math.ceil(elements / GROUP) * (4 + GROUP * bits // 8)


def scale(bits: int) -> float:
    """How the variance of stochastic rounding scales with the width."""
    return (2**bits - 1) ** -2


def measured_table(case: Case, peer: FlatGroups, plain: Gradient) -> Table:
    """From two passes per place and measured width; other widths scale from their neighbours."""
    peer.widths = {}
    distance(case, peer, plain)  # counts the places
    found = []
    for place in range(len(peer.elements)):
        errors = {}
        for bits in MEASURED:
            peer.widths = {place: bits}
            errors[bits] = sum(distance(case, peer, plain) for _ in range(DRAWS)) / DRAWS
        down, up = (errors[bits] * scale(3) / scale(bits) for bits in (2, 4))
        errors[3] = math.sqrt(down * up)
        errors |= {bits: errors[4] * scale(bits) / scale(4) for bits in (5, 6, 8)}
        found.append(errors)
    return found


def formula_table(table: Table) -> Table:
    """What the paper's formula makes of the errors at 4 bits."""
    return [{bits: row[4] * scale(bits) / scale(4) for bits in WIDTHS} for row in table]


def plan(table: Table, elements: list[int], budget: int) -> dict[int, int]:
    """Widths within `budget` bytes, widened where a byte saves the most error."""
    widths = dict.fromkeys(range(len(elements)), WIDTHS[0])
    left = budget - sum(stored_bytes(count, WIDTHS[0]) for count in elements)
    if left < 0:
        raise ValueError(f"budget={budget} bytes are too few for 1 bit per element")

    def widening(place: int, wider: int) -> tuple[float, int, int, int]:
        bits, count = widths[place], elements[place]
        cost = stored_bytes(count, wider) - stored_bytes(count, bits)
        return (table[place][wider] - table[place][bits]) / cost, place, wider, cost

    heap = [widening(place, WIDTHS[1]) for place in widths]
    heapq.heapify(heap)
    while heap:
        _, place, wider, cost = heapq.heappop(heap)
        if cost <= left:
            left -= cost
            widths[place] = wider
            if wider < WIDTHS[-1]:
                following = WIDTHS[WIDTHS.index(wider) + 1]
                heapq.heappush(heap, widening(place, following))
    return widths
