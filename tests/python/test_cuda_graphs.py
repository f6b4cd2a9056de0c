# SPDX-License-Identifier: Apache-2.0
"""Steps that are captured into a CUDA graph: each replay rounds anew, on the values it finds."""

import backfold
import pytest
import torch
from backfold import codecs
from test_traps_cuda import Everything, batch, needs_gpu, relative_error
from torch import nn

pytestmark = needs_gpu


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 16)).cuda()


class Step:
    """Forward and backward of a batch that stands where the graph will read it."""

    def __init__(self, model: nn.Module, fold: backfold.Controller | None):
        self.model, self.fold = model, fold
        self.x = torch.randn(512, 256, device="cuda")

    def __call__(self) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        if self.fold is None:
            loss = self.model(self.x).square().mean()
        else:
            with self.fold:
                loss = self.model(self.x).square().mean()
        loss.backward()
        return loss

    def gradient(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def captured(self, warm: int = 3) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm):
                self()
        torch.cuda.current_stream().wait_stream(stream)
        self.model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph


def plain_gradient(step: Step) -> torch.Tensor:
    twin = Step(network(), None)
    twin.model.load_state_dict(step.model.state_dict())
    twin.x = step.x
    twin()
    return twin.gradient()


def test_replays_read_what_is_there_and_round_anew():
    fold = backfold.Controller(bits=4, adaptive=False, min_bytes=0)
    step = Step(network(), fold)
    graph = step.captured()
    for seed in range(3):
        torch.manual_seed(seed)
        step.x.normal_()
        plain = plain_gradient(step)
        draws = []
        for _ in range(64):
            graph.replay()
            draws.append(step.gradient().clone())
        assert relative_error(draws[0], plain) < 0.1
        assert not any(torch.equal(draws[0], other) for other in draws[1:])
        # Errors average out: by a factor of 8, less what is bias; by none if replays round alike.
        mean = torch.stack(draws).mean(0)
        assert relative_error(mean, plain) < 0.3 * relative_error(draws[0], plain)


def test_exact_replays_are_bitwise_those_of_plain():
    plain, exact = (
        Step(network(), None),
        Step(network(), backfold.Controller(bits=None, min_bytes=0)),
    )
    graphs = [step.captured() for step in (plain, exact)]
    for seed in range(3):
        for step, graph in zip((plain, exact), graphs, strict=True):
            torch.manual_seed(seed)
            step.x.normal_()
            graph.replay()
        assert torch.equal(plain.gradient(), exact.gradient())


def test_a_planned_training_goes_on_in_replays():
    torch.manual_seed(0)
    model = Everything("cuda")
    words, targets = batch("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
    fold = backfold.Controller(model, bits=4, min_bytes=0)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with fold:
            loss = model(words, targets)
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(6):  # measured in the third
            first = step().item()
    torch.cuda.current_stream().wait_stream(stream)
    assert fold.report().to_dict()["plan"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(100):
        graph.replay()
    after = loss.item()
    assert after < 0.5 * first
    for _ in range(3):  # and goes on outside of the graph
        last = step().item()
    assert last < 1.2 * after


def capture(step: Step) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()


def refused(fold: backfold.Controller, steps: int, match: str, error=RuntimeError) -> None:
    step = Step(network(), fold)
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    with pytest.raises(error, match=match):
        capture(step)
    torch.cuda.synchronize()
    step()  # and the controller is still usable
    assert relative_error(step.gradient(), plain_gradient(step)) < 0.5


def test_a_first_block_is_not_captured():
    refused(
        backfold.Controller(bits=4, adaptive=False, min_bytes=0), 0, "in the first block on cuda"
    )


def test_nothing_is_captured_before_there_is_a_plan():
    refused(backfold.Controller(network(), bits=4, min_bytes=0), 1, "before the first plan is made")


def test_offloading_is_not_captured():
    fold = backfold.Controller(bits=4, adaptive=False, min_bytes=0, offload=True)
    refused(fold, 2, "offloading cannot be captured")


def test_projections_are_not_captured():
    fold = backfold.Controller(codec=codecs.Project(4), bits=4, adaptive=False, min_bytes=0)
    refused(fold, 2, "Project.* cannot be captured in a CUDA graph", ValueError)


def test_a_capture_that_begins_inside_of_a_block_rounds_nothing():
    fold = backfold.Controller(bits=4, adaptive=False, min_bytes=0)
    step = Step(network(), fold)
    step()
    torch.cuda.synchronize()
    step.model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with fold, torch.cuda.graph(graph):
        step.model(step.x).square().mean().backward()
    reasons = {site["reason"] for site in fold.report().to_dict()["sites"]}
    assert "packing failed" in reasons  # a warning says why, once in a process
    step.x.normal_()
    graph.replay()
    assert relative_error(step.gradient(), plain_gradient(step)) < 1e-5  # 0.03 at 4 bits
