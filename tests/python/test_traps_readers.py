# SPDX-License-Identifier: Apache-2.0
"""Traps of saved-tensor hooks, part four: who reads what was saved, and when."""

import backfold
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("one_thread")


def leaf(*sizes: int, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(device).requires_grad_()


def saved_by(node: torch.autograd.graph.Node) -> dict[str, torch.Tensor]:
    """Everything a gradient inspector finds at a node."""
    found = {name: getattr(node, name) for name in dir(node) if name.startswith("_saved_")}
    return {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}


class Chain:
    """x -> gelu -> tanh -> sum: each node has its own packet."""

    def __init__(self, device: str):
        self.x = leaf(64, 64, device=device)
        with backfold.Controller(bits=4, min_bytes=0, adaptive=False):
            self.gelu = nn.functional.gelu(self.x * 2)
            self.tanh = self.gelu.tanh()
            self.out = self.tanh.sum()

    def nodes(self) -> list[torch.autograd.graph.Node]:
        return [self.tanh.grad_fn, self.gelu.grad_fn]

    def gradient(self) -> torch.Tensor:
        self.out.backward()
        return self.x.grad


def hook_on_a_result(chain, read):
    chain.tanh.register_hook(lambda gradient: read())


def hook_before_a_node(chain, read):
    chain.gelu.grad_fn.register_prehook(lambda gradients: read())


def hook_after_a_node(chain, read):
    chain.gelu.grad_fn.register_hook(lambda inputs, outputs: read())


def hook_on_several(chain, read):
    torch.autograd.graph.register_multi_grad_hook((chain.tanh, chain.out), lambda gradients: read())


def retained_gradient(chain, read):
    chain.tanh.retain_grad()
    chain.tanh.register_hook(lambda gradient: read())


HOOKS = [
    hook_on_a_result,
    hook_before_a_node,
    hook_after_a_node,
    hook_on_several,
    retained_gradient,
]


@pytest.mark.parametrize("hook", HOOKS)
def test_trap_42_a_hook_may_read_what_a_node_saved(device, hook):
    # If any read in backward counted as the node's own, the packet would be dropped at the hook's
    # read, and the node would be told that it runs for the second time.
    expected = Chain(device).gradient()
    chain = Chain(device)
    seen = []

    def read() -> None:
        for node in chain.nodes():
            if node is chain.tanh.grad_fn and hook in (hook_before_a_node, hook_after_a_node):
                continue  # it has run, and is empty in plain torch as well
            seen.extend((saved_by(node), saved_by(node)))

    hook(chain, read)
    assert torch.equal(chain.gradient(), expected)
    assert seen and all(seen)
    for once, again in zip(seen[::2], seen[1::2], strict=True):
        assert all(torch.equal(once[name], again[name]) for name in once)


def test_trap_42_hooks_of_modules_may_read_what_a_node_saved(device):
    def run(inspect: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
        with backfold.Controller(model, bits=4, min_bytes=0, adaptive=False):
            inner = model[1](model[0](torch.linspace(-2, 2, 4096, device=device).view(64, 64)))
            out = model[2](inner)
        nodes = [out.grad_fn, inner.grad_fn]
        if inspect:
            model[1].register_full_backward_hook(lambda *_: saved_by(nodes[1]) and None)
            inner.register_hook(lambda _: saved_by(nodes[1]) and None)
            out.register_hook(lambda _: [saved_by(node) for node in nodes] and None)
        out.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)


class Inspector(TorchDispatchMode):
    """Looks at saved tensors from inside each operator that backward calls."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes, self.reads = nodes, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for name in ("aten::tanh_backward", "aten::gelu_backward"):
            if function.name() == name:
                for node in self.nodes:
                    self.reads += len(saved_by(node))
        return function(*args, **(kwargs or {}))


def test_trap_42_a_dispatch_mode_may_read_what_a_node_saved(device):
    # The node that runs is then the reader's, or another one without hooks.
    expected = Chain(device).gradient()
    chain = Chain(device)
    with Inspector([chain.gelu.grad_fn]) as inspector:
        assert torch.equal(chain.gradient(), expected)
    assert inspector.reads == 2


def test_a_second_backward_is_refused_as_in_plain_torch(device):
    chain = Chain(device)
    chain.out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        chain.out.backward()


class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Second(First):
    pass


def test_a_refused_reader_is_named_even_if_it_is_a_python_function(device):
    # All Python functions share one C++ type: a name cached by type would be the first one's.
    for function in (First, Second):
        x = leaf(64, 64, device=device)
        with backfold.Controller(bits=None, min_bytes=0):
            h = (x * 2).relu()
            out = function.apply(h)
        relu = h.grad_fn
        out.grad_fn.register_prehook(lambda _, relu=relu: saved_by(relu) and None)
        with pytest.raises(RuntimeError, match=f"but {function.__name__}Backward asks for it"):
            out.sum().backward()
