# SPDX-License-Identifier: Apache-2.0
"""Differentiates backward graphs of torch.compile, to tell what rounding their tensors does.

src/torch/probe/graphs.h has the method. A backward graph is run once as it is, in segments, of
which only the values at their borders are kept; then each segment once more with autograd's record,
the last one first. So what is in memory at once are a few layers, whatever the graph.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from backfold import _C
from backfold._graph_attention import attention_backward
from backfold._graph_nodes import elements

_SEGMENTS = 24
_LEAST = 1 << 24  # elements of a segment

# What these are made of has one.
_WITHOUT_DERIVATIVE = {
    torch.ops.aten.silu_backward.default,
    torch.ops.aten.mish_backward.default,
    torch.ops.aten.native_group_norm_backward.default,
} & torch._decomp.decomposition_table.keys()

_numbers = itertools.count(1)
_graphs: dict[int, MeasuredGraph] = {}


class MeasuredGraph:
    """A backward graph as it was before anything in it was folded."""

    def __init__(self, backward: Graph, folded: set[str], parameters: list[bool]) -> None:
        self.number = next(_numbers)
        self._graph = Graph()
        self._graph.output(self._graph.graph_copy(backward, {}))
        for node in self._graph.find_nodes(op="call_function", target=operator.getitem):
            node.args[0].append(node)  # no border runs between them
        self._constants = {
            node.target: getattr(backward.owning_module, node.target)
            for node in self._graph.find_nodes(op="get_attr")
        }
        self._folded = folded
        self._parameters = parameters
        inputs = self._graph.find_nodes(op="placeholder")
        given = [node for node in inputs if node.name not in folded]
        tensors = [node for node in given if isinstance(node.meta["val"], torch.Tensor)]
        self.sizes = [node.name for node in given if node not in tensors]
        owned = [node for node in tensors if not _is_lasting(node)]
        self.tensors = [node.name for node in tensors if node not in owned]
        self.lasting = len(self.tensors)
        self.tensors += [node.name for node in owned]
        self._segments = _cut(self._graph)
        self._outputs = self._graph.output_node().args[0]
        _graphs[self.number] = self

    def measure(
        self, run: _C.GraphRun, counting: _C.LeafWeights, counted_before: float, draw: Callable
    ) -> tuple[float, float]:
        """Tells `run` the derivative by each of its packets.

        `counting` says how errors count, `counted_before` is the energy, counted so, of all
        parameters that the gradient goes on to, and `draw` makes a random tensor like another.
        Returns the energy of the gradient, and that as it counts.
        """
        given = dict(zip(self.tensors, run.tensors, strict=True))
        given.update(zip(self.sizes, run.sizes, strict=True))
        borders, results = self._run(run, given)
        leaves = [
            node
            for node, parameter in zip(self._outputs, self._parameters, strict=True)
            if parameter and node in results
        ]
        energies = [(_energy(results[node]), results[node].numel()) for node in leaves]
        weights = counting.of(energies)
        leaving = [
            node
            for node, parameter in zip(self._outputs, self._parameters, strict=True)
            if not parameter and node in results
        ]
        # An error of the gradient that leaves is taken to change all that follows as much, in
        # relation to it.
        passed_on = sum(_energy(results[node]) for node in leaving)
        gain = (counted_before / passed_on) ** 0.5 if passed_on else 0.0
        scales = dict.fromkeys(self._outputs, 1.0) | dict.fromkeys(leaving, gain)
        for node, weight in zip(leaves, weights, strict=True):
            scales[node] = weight**0.5
        del results
        self._differentiate(run, given, borders, lambda node, like: scales[node] * draw(like))
        counted = (weight * energy for weight, (energy, _) in zip(weights, energies, strict=True))
        return sum(energy for energy, _ in energies), sum(counted)

    def _run(self, run: _C.GraphRun, given: dict[str, Any]) -> tuple[list[dict], dict]:
        """The values at the beginning of each segment, and the results."""
        borders, values = [], {}
        with torch.no_grad():
            for segment in self._segments:
                borders.append(values)
                inside = self._inputs(run, given, segment) | values
                for node in segment.nodes:
                    inside[node] = _called(node, inside)
                values = {node: inside[node] for node in segment.after}
        return borders, {node: values[node] for node in self._outputs if node in values}

    def _inputs(self, run: _C.GraphRun, given: dict[str, Any], segment: _Segment) -> dict:
        found = {}
        for node in segment.inputs:
            if node.op == "get_attr":
                found[node] = self._constants[node.target]
            elif node.name in self._folded:
                found[node] = run.value(node.name)
            else:
                found[node] = given[node.name]
        return found

    def _differentiate(
        self, run: _C.GraphRun, given: dict[str, Any], borders: list[dict], direction: Callable
    ) -> None:
        gradients: dict[Node, torch.Tensor] = {}
        results = {node for node in self._outputs if isinstance(node, Node)}
        for segment in reversed(self._segments):
            before = borders.pop()
            inside = self._inputs(run, given, segment) | before
            leaves = {
                node: value.detach().requires_grad_()
                for node, value in inside.items()
                if _is_floating(value) and (node in before or node.name in self._folded)
            }
            inside |= leaves
            with torch.enable_grad():
                for node in segment.nodes:
                    inside[node] = _called(node, inside)
            made, along = [], []
            for node in segment.nodes:
                value = inside[node]
                if not _is_floating(value) or not value.requires_grad:
                    continue
                known = gradients.pop(node, None)
                if node in results:
                    own = direction(node, value)
                    known = own if known is None else known + own
                if known is not None:
                    made.append(value)
                    along.append(known)
            del inside
            found = [None] * len(leaves)
            if made:
                found = torch.autograd.grad(made, list(leaves.values()), along, allow_unused=True)
            del made, along
            for node, gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    known = gradients.get(node)
                    gradients[node] = gradient if known is None else known + gradient
            for node in segment.first_used:
                gradient = gradients.pop(node, None)
                if gradient is not None and node.name in self._folded:
                    run.measure(node.name, gradient)


class _Segment:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.inputs: list[Node] = []  # of the graph
        self.first_used: list[Node] = []  # inputs that no earlier segment has
        self.after: list[Node] = []  # values that later segments read, or results


def _cut(graph: Graph) -> list[_Segment]:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    sizes = [_size(node) for node in nodes]
    most = max(sum(sizes) / _SEGMENTS, _LEAST)
    segments, filled = [_Segment([])], 0
    for node, size in zip(nodes, sizes, strict=True):
        if filled + size > most and segments[-1].nodes:
            segments.append(_Segment([]))
            filled = 0
        segments[-1].nodes.append(node)
        filled += size
    where = {node: i for i, segment in enumerate(segments) for node in segment.nodes}
    where[graph.output_node()] = len(segments)
    last = {node: max((where[user] for user in node.users), default=-1) for node in graph.nodes}
    seen: set[Node] = set()
    for i, segment in enumerate(segments):
        read = dict.fromkeys(one for node in segment.nodes for one in node.all_input_nodes)
        segment.inputs = [node for node in read if node.op in ("placeholder", "get_attr")]
        segment.first_used = [node for node in segment.inputs if node not in seen]
        seen.update(segment.inputs)
        segment.after = [node for node in nodes if where[node] <= i < last[node]]
    return segments


def _size(node: Node) -> int:
    value = node.meta.get("val")
    return (elements(node) or 0) if isinstance(value, torch.Tensor) else 0


def _is_lasting(node: Node) -> bool:
    """Whether an input belongs to the program, so that the graph does not write to it."""
    return "tangents" in str(node.target) or str(node.target).startswith("primals")


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _energy(gradient: torch.Tensor) -> float:
    return float(gradient.detach().float().square().sum())


def _called(node: Node, values: dict[Node, Any]) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.target is torch.ops.prims.convert_element_type.default:
        return args[0].to(args[1])  # which has a derivative
    if node.target in _WITHOUT_DERIVATIVE:
        return torch._decomp.decomposition_table[node.target](*args, **kwargs)
    return attention_backward(node.target, args, kwargs) or node.target(*args, **kwargs)


def measure_graphs(
    runs: list[_C.GraphRun], counting: _C.LeafWeights, seed: int
) -> tuple[float, str]:
    """Measures runs of graphs, the first of the model first. `counting` says how errors count.

    Returns the energy of the gradient and, if one could not be measured, why.
    """
    energy, counted, failure = 0.0, 0.0, ""
    generators: dict[torch.device, torch.Generator] = {}

    def draw(like: torch.Tensor) -> torch.Tensor:
        generator = generators.get(like.device)
        if generator is None:
            generator = torch.Generator(like.device).manual_seed(seed)
            generators[like.device] = generator
        return torch.empty_like(like).normal_(generator=generator)

    devices = {tensor.device for run in runs for tensor in run.tensors if tensor.is_cuda}
    with torch.random.fork_rng([device.index for device in devices]):
        for run in runs:
            # What a run has kept was written on the stream of its backward.
            _wait_for(devices)
            try:
                own = _graphs[run.graph].measure(run, counting, counted, draw)
                energy, counted = energy + own[0], counted + own[1]
            except Exception as error:  # an operator without a derivative, or too little memory
                failure = str(error)
            _wait_for(devices)
    return energy, failure


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
