# SPDX-License-Identifier: Apache-2.0
"""Sites: their names, and what depends on them: rounding, keep, min_bytes."""

import backfold
import torch
from small_network import batch, equal, gradients, network
from torch import nn


def names(fold: backfold.Controller) -> set[tuple]:
    sites = fold.report().to_dict()["sites"]
    return {(site["module"], site["op"], site["slot"], site["occurrence"]) for site in sites}


class Dynamic(nn.Module):
    """Branches, loops and an early exit."""

    def __init__(self):
        super().__init__()
        self.first, self.loop, self.last = (nn.Linear(64, 64) for _ in range(3))
        self.side = nn.Linear(64, 64)

    def forward(self, x, turns=2, branch=False, leave=False):
        h = self.first(x).tanh()
        if branch:
            h = h + self.side(h).sigmoid()
        if leave:
            return h
        for _ in range(turns):
            h = self.loop(h).exp().clamp(max=2)
        return self.last(h).tanh()


def test_names_of_sites_survive_whatever_happens_between(device):
    # The order of saving is not a name: a branch shifts everything after it.
    model = Dynamic().to(device)
    fold = backfold.Controller(model, bits=4, min_bytes=0)

    def step(rows=64, **how):
        with fold:
            out = model(batch(device, rows) * 2, **how)
        out.sum().backward()
        return names(fold)

    usual = step()
    assert {module for module, *_ in usual} >= {"first", "loop", "last"}
    branching = step(branch=True)
    assert {name for name in branching if name[0] == "side"}
    assert {name for name in branching if name[0] == "last"} == {
        name for name in usual if name[0] == "last"
    }
    assert {name for name in step(leave=True) if name[0]} < usual
    assert step(rows=17) == step(rows=128) == usual  # other lengths
    with torch.no_grad():
        model.eval()
        model(batch(device))
        model.train()
    assert step() == usual
    longer = step(turns=3)  # more of the same, other names for the third turn at most
    assert usual <= longer


def test_the_same_seed_gives_the_same_gradients(device):
    model, x = network(device), batch(device)

    def run(seed):
        fold = backfold.Controller(model, bits=2, min_bytes=0, seed=seed)
        return [gradients(model, fold, x) for _ in range(3)]

    first, again, other = run(5), run(5), run(6)
    assert all(equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(equal(a, b) for a, b in zip(first, other, strict=True))
    assert not equal(first[0], first[1])  # each step rounds afresh


def test_kept_modules_are_exact(device):
    model, x = network(device), batch(device)

    def lossy(**options) -> set[str]:
        fold = backfold.Controller(model, bits=2, min_bytes=0, derive=False, **options)
        gradients(model, fold, x)
        sites = fold.report().to_dict()["sites"]
        return {site["module"] for site in sites if site["kind"] in ("lossy", "zero-exact")}

    everywhere = lossy()
    assert everywhere >= {"0.0", "0.2"}
    for keep in (["0*", "1"], [model], "*", [model[0], "1"]):
        assert lossy(keep=keep) <= {""}  # the loss is outside of all modules
    for keep in (["0.2"], [model[0][2]], model[0][2]):
        assert lossy(keep=keep) == everywhere - {"0.2"}


def test_small_tensors_are_passed(device):
    model, x = network(device), batch(device)
    fold = backfold.Controller(model, bits=4, min_bytes=64 * 64 * 4 + 1)
    plain = torch.autograd.grad(model(x * 2).square().mean(), list(model.parameters()))
    assert equal(gradients(model, fold, x), list(plain))
    sites = fold.report().to_dict()["sites"]
    assert {site["kind"] for site in sites} <= {"passed", "parameter", "alive", "shared"}
    assert any("min_bytes" in site["reason"] for site in sites if site["kind"] == "passed")
    fold = backfold.Controller(model, bits=4, min_bytes=64 * 64 * 4)
    assert not equal(gradients(model, fold, x), list(plain))
