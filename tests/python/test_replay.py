# SPDX-License-Identifier: Apache-2.0
"""A recorded call of the model: rerun, it gives the same gradients and touches nothing."""

import copy
import dataclasses
import doctest
import random
import types

import numpy
import pytest
import torch
from backfold import _replay
from backfold._call_state import tensors_in
from backfold._replay import ModelCall
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread")


def network(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 5)]
    return nn.Sequential(*layers).to(device)


def batch(device: str = "cpu", rows: int = 16) -> torch.Tensor:
    return torch.linspace(-3, 3, rows * 12).view(rows, 12).sin().to(device)


def gradients_again(call: ModelCall) -> list[torch.Tensor | None]:
    """What one run sends to each of the call's leaves."""
    run, leaves = call.step(), call.leaves
    found: list[torch.Tensor | None] = [None] * len(leaves)
    handles = [
        leaf.register_hook(lambda gradient, i=i: found.__setitem__(i, gradient.clone()))
        for i, leaf in enumerate(leaves)
    ]
    with call.untouched():
        run()
    for handle in handles:
        handle.remove()
    return found


def recorded(model, loss_of, fraction: float = 1.0) -> tuple[ModelCall, list[torch.Tensor | None]]:
    """The call inside `loss_of`, and the gradients of the user's own step."""
    with ModelCall.watch(model, fraction) as call:
        loss = loss_of()
    loss.backward()
    return call, [p.grad for p in model.parameters() if p.requires_grad]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_examples_of_the_documentation_run():
    results = doctest.testmod(_replay)
    assert results.failed == 0
    assert results.attempted >= 5


def test_gradients_are_those_of_the_users_step(device):
    model, x = network(device), batch(device)
    call, expected = recorded(model, lambda: model(x).square().mean())
    assert call.ready
    assert call.reason == ""
    assert (call.share, call.sliced_gradients) == (1.0, False)
    torch.rand(100, device=device)  # dropout draws as it did, wherever the generators are now
    model.eval()
    for _ in range(2):
        assert_same(gradients_again(call), expected)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("rows", "fraction", "kept"), [(16, 0.25, 4), (100, 0.07, 7), (7, 0.5, 4), (4, 0.1, 1)]
)
def test_a_part_of_the_batch_gets_its_rows_of_the_gradient(device, rows, fraction, kept):
    model, x = network(device)[0], batch(device, rows)
    call, _ = recorded(model, lambda: model(x).exp().mean(), fraction)
    assert call.share == kept / rows
    assert call.sliced_gradients
    for tensor in (*call._arguments.tensors, *call._gradients.values()):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # no view of all rows
    model.zero_grad()
    (model(x[:kept]).exp().sum() / (rows * 24)).backward()
    for found, parameter in zip(gradients_again(call), model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


def state(model, optimizer, scaler) -> list[bytes]:
    """Everything that a step may change, as bytes."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    tensors += [torch.get_rng_state(), *(t for s in optimizer.state.values() for t in s.values())]
    others = [scaler.state_dict(), [m.training for m in model.modules()], random.getstate()]
    return [
        *(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
          for tensor in tensors if tensor is not None),
        *(repr(other).encode() for other in others),
        numpy.random.get_state()[1].tobytes(),
        repr([t._version for t in (*model.parameters(), *model.buffers())]).encode(),
    ]  # fmt: skip


class Restless(nn.Module):
    """Draws from all generators and changes buffers in every possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("expanded", torch.ones(1).expand(5))
        self.register_buffer("nan", torch.full((3,), torch.nan))

    def forward(self, x, scale=1.0):
        x = x * (1 + random.random() * numpy.random.rand()) * scale
        y = self.body(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y + self.mean * self.expanded


def train(replays: bool) -> list[bytes]:
    model = Restless()
    random.seed(1)
    numpy.random.seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(6):
        with ModelCall.watch(model) as call, torch.autocast("cpu", torch.bfloat16):
            loss = model(batch() + step, scale=0.5).float().square().mean()
        scaler.scale(loss).backward()
        if replays:
            before = state(model, optimizer, scaler)
            run = call.step()
            with call.untouched():
                run()
                run()
                model.train(False)
                model.zero_grad()
            assert state(model, optimizer, scaler) == before
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return state(model, optimizer, scaler)


def test_training_is_bitwise_the_same_with_and_without_runs_in_between():
    assert train(replays=False) == train(replays=True)


def test_a_graph_that_waits_for_backward_may_have_saved_a_buffer_that_a_run_writes():
    class Tracking(nn.Linear):
        def __init__(self):
            super().__init__(12, 12)
            self.register_buffer("mean", torch.ones(12))

        def forward(self, x):
            y = super().forward(x)
            if self.training:
                self.mean.mul_(0.9).add_(y.detach().mean(0))
            return y

    model = Tracking()
    call, _ = recorded(model, lambda: model(batch()).sum())
    waiting = (model.eval()(batch()) * model.mean).sum()
    expected = torch.autograd.grad(waiting, model.weight, retain_graph=True)
    gradients_again(call)
    assert_same(torch.autograd.grad(waiting, model.weight), expected)


def test_autocast_is_what_it_was_and_remembers_no_moved_parameter():
    model, x = network(), batch()

    def loss_of():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    call, expected = recorded(model, loss_of)
    assert_same(gradients_again(call), expected)
    seen = []
    model.register_forward_hook(lambda module, args, result: seen.append(result))
    model[4].bias.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.float16):
        model(x)
        with torch.no_grad():
            model[4].bias += 1
        gradients_again(call)
        model(x)
    moved, in_backward, after = seen[1:]
    assert moved.dtype == torch.bfloat16
    assert not in_backward
    assert after.dtype == torch.float16
    with torch.no_grad():
        model[4].bias -= 1
    gradients_again(call)
    torch.testing.assert_close(moved, seen[4] + 1, atol=0.02, rtol=0.02)  # stale casts: off by 1


def test_an_aborted_backward_leaves_nothing_behind():
    model, x = network(), batch()
    call, expected = recorded(model, lambda: model(x).square().mean())

    def abort(tensor):
        raise InterruptedError

    run, buffers = call.step(), copy.deepcopy(dict(model.named_buffers()))
    for _ in range(2):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, abort)
        with pytest.raises(InterruptedError), call.untouched(), hooks:
            run()
        assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
        assert_same([p.grad for p in model.parameters()], expected)
    assert_same(gradients_again(call), expected)


@pytest.mark.parametrize("leaf", [True, False])
def test_arguments_that_require_gradients_become_leaves(leaf):
    model, x = network(), batch().requires_grad_()
    given = x if leaf else x * 1
    if not leaf:
        given.retain_grad()
    call, expected = recorded(model, lambda: model(given).square().mean())
    (own,) = call.input_leaves
    assert own is not x
    assert own.is_leaf
    before = given.grad.clone()
    assert_same(gradients_again(call), [*expected, before])
    assert torch.equal(given.grad, before)
    assert own.grad is None


def test_arguments_are_those_of_the_call_whatever_happens_to_them():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, x, parts, *, offset):
            parts.append(x.mul_(2))
            return self.linear(F.relu(sum(parts), inplace=True)) + offset["by"]

    model = InPlace()
    x, parts, offset = batch(), [torch.ones(16, 12)], {"by": torch.ones(16, 5)}
    call, expected = recorded(model, lambda: model(x, parts, offset=offset).exp().mean())
    assert len(parts) == 2
    x.zero_()
    offset["by"].zero_()
    parts.clear()
    for _ in range(2):
        assert_same(gradients_again(call), expected)


def test_what_belongs_to_the_model_is_not_copied():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(12, 12))

        def forward(self, x, weight, activation, layer):
            assert weight is self.weight
            assert layer is other
            return activation(x @ weight)

    model, other = Head(), nn.Linear(2, 2)
    holder = types.MethodType(lambda self, x: x.exp(), other)
    x = batch()
    call, expected = recorded(model, lambda: model(x, model.weight, holder, other).mean())
    assert call.share == 1.0  # if copied, 12 rows of weight beside 16 of x would not be cut
    assert_same(gradients_again(call), expected)


def bert(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, **options,
    )  # fmt: skip
    given = {
        "input_ids": torch.arange(8 * 6).view(8, 6) % 50,
        "attention_mask": torch.ones(8, 6, dtype=torch.long),
        "labels": torch.arange(8) % 2,
    }
    return transformers.BertForSequenceClassification(config), given


def test_a_loss_inside_the_model_is_counted_once():
    model, given = bert()
    call, expected = recorded(model, lambda: model(**given).loss)
    assert_same(gradients_again(call), expected)  # with the logits' gradient on top: 2 times
    call, _ = recorded(model, lambda: model(**given).loss, fraction=0.5)
    assert call.share == 0.5
    assert not call.sliced_gradients


def test_a_loss_inside_the_model_that_nobody_uses_does_not_matter():
    model, given = bert()
    call, expected = recorded(model, lambda: model(**given).logits.square().mean())
    assert_same(gradients_again(call), expected)
    call, _ = recorded(model, lambda: model(**given).logits.square().mean(), fraction=0.5)
    assert call.sliced_gradients


def test_outputs_that_were_computed_from_one_another_are_counted_once():
    model, given = bert(output_hidden_states=True)

    def loss_of():
        result = model(**given)
        return result.logits.exp().mean() + sum(h.abs().mean() for h in result.hidden_states)

    call, expected = recorded(model, loss_of)
    assert_same(gradients_again(call), expected)


def test_a_mean_beside_rows_of_a_part_weighs_as_in_the_whole():
    class Variational(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            return self.first(x), self.second(x).square().mean()

    model, x = Variational(), batch()
    call, _ = recorded(model, lambda: sum(out.sum() for out in model(x)), fraction=0.25)
    model.zero_grad()
    rows, mean = model(x[:4])
    (rows.sum() + mean / 4).backward()
    for found, parameter in zip(gradients_again(call), model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


class Returns(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.make, self.weight = make, nn.Parameter(torch.ones(12, 12))

    def forward(self, x):
        return self.make(x @ self.weight)


class Results(dict):
    pass


class Pair(tuple):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda y: [y, {"more": (y.exp(),)}],
        lambda y: Results(y=y, more=y.exp()),
        lambda y: Pair((y, y.exp())),
        lambda y: types.SimpleNamespace(y=y, more=[y.exp()], text="?"),
        lambda y: Graph(x=y, edges=y.exp()),
    ],
)
def test_outputs_are_found_in_containers_and_objects(make):
    model = Returns(make)
    call, expected = recorded(
        model, lambda: sum(y.square().mean() for y in tensors_in(model(batch())))
    )
    assert len(call._gradients) == 2
    assert_same(gradients_again(call), expected)


@dataclasses.dataclass(slots=True)
class Graph:
    x: torch.Tensor
    edges: torch.Tensor


class Propagation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, graph):
        source, target = graph.edges
        graph.x = self.linear(graph.x)
        graph.x = torch.zeros_like(graph.x).index_add(0, target, graph.x[source])
        return types.SimpleNamespace(nodes=graph.x.relu(), cycle=graph)


def test_graphs_are_recorded_whole():
    edges = torch.stack([torch.arange(16), torch.arange(16).flip(0)])
    geometric = pytest.importorskip("torch_geometric.data")
    for graph in (Graph(batch(), edges), geometric.Data(x=batch(), edges=edges)):
        model = Propagation()
        call, expected = recorded(
            model, lambda model=model, graph=graph: model(graph).nodes.square().mean(), 0.25
        )
        assert call.share == 1.0
        for _ in range(2):
            assert_same(gradients_again(call), expected)


@pytest.mark.parametrize(
    "arguments",
    [(batch(), torch.ones(1, 12)), (batch(rows=1),), (batch().to_sparse(),)],
    ids=["other sizes", "one row", "sparse"],
)
def test_arguments_without_a_common_batch_are_recorded_whole(arguments):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(12, 3))

        def forward(self, x, *others):
            return (x @ self.weight).sum(0, keepdim=True).expand(x.size(0), 3) * 1

    model = Model()
    call, expected = recorded(model, lambda: model(*arguments).square().sum(), 0.25)
    assert call.share == 1.0
    assert_same(gradients_again(call), expected)


def test_a_part_that_fails_is_recorded_whole_the_next_time():
    class Pairs(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y @ y.T  # 16 rows of 16, of which no part is 4 rows of 16

    model, x = Pairs(12, 5), batch()
    call, _ = recorded(model, lambda: model(x).exp().mean(), 0.25)
    run = call.step()
    with pytest.raises(RuntimeError, match="other tensors"), call.untouched():
        run()
    model.zero_grad()
    call, expected = recorded(model, lambda: model(x).exp().mean(), 0.25)
    assert call.share == 1.0
    assert_same(gradients_again(call), expected)
