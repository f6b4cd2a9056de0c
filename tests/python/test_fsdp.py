# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters are sharded over processes (FSDP2), and DTensor activations."""

import contextlib

import backfold
import pytest
import torch
from processes import returned, run
from torch import distributed, nn
from torch.nn import functional

if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(functional.silu(self.up(self.norm(x))))


def network(frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), Block(32), Block(32), nn.Linear(32, 6))
    if frozen:  # as under LoRA: their backward still reads the weights
        for parameter in model[1].parameters():
            parameter.requires_grad_(False)
    return model


def trained(rank, kind, precision, frozen, autocast, early, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = network(frozen)
    fold = backfold.Controller(model, min_bytes=0, **options) if early else None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision else None
    mesh = init_device_mesh("cpu", (2,))
    for part in (model[1], model[2], model[3], model):
        fully_shard(part, mesh=mesh, **({"mp_policy": policy} if policy else {}))
    if fold is None and kind != "plain":
        fold = backfold.Controller(model, min_bytes=0, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * rank + step)
        x = torch.randn(16, 20, generator=generator)
        y = torch.randint(6, (16,), generator=generator)
        block = fold if kind != "plain" else contextlib.nullcontext()
        with block, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = fold.report().to_dict() if kind != "plain" else None
    return losses, report, fold.plan() if kind == "planned" else None


def both(rank, precision, frozen, autocast, early):
    rest = precision, frozen, autocast, early
    with pytest.warns(UserWarning, match="parameters are shards"):
        planned = trained(rank, "planned", *rest, bits=8)
    return (
        trained(rank, "plain", precision, frozen, autocast, False),
        trained(rank, "exact", *rest, bits=None),
        planned,
    )


@pytest.mark.parametrize(
    "precision, frozen, autocast, early",
    [(False, False, False, False), (True, True, False, True), (False, True, True, False)],
)
def test_gathered_parameters_are_never_packed(precision, frozen, autocast, early):
    results = returned(run(both, 2, precision, frozen, autocast, early))
    for (plain, _, _), (exact, report, _), (planned, _, plan) in results:
        assert exact == plain
        # 8 bits of activations move the fourth digit; rounded weights or freed memory more.
        assert planned == pytest.approx(plain, rel=0.01)
        assert plan == results[0][2][2] and plan["sites"]
        assert {site["estimate"] for site in plan["sites"].values()} == {"signal gain"}
        weights = [site for site in report["sites"] if "parameter" in site["kind"]]
        assert len(weights) >= 4  # or their copies


def folded_weights(rank, frozen):
    """Names of operators and arguments at which something was rounded."""
    _, report, _ = trained(
        rank, "fixed", False, frozen, frozen, False, bits=2, adaptive=False, derive=False
    )
    return {(s["op"], s["slot"]) for s in report["sites"] if s["kind"] in ("lossy", "zero-exact")}


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_that_holds_weights_is_rounded(frozen):
    for lossy in returned(run(folded_weights, 2, frozen)):
        assert lossy
        assert not [place for place in lossy if place[1] in ("mat2", "weight")], lossy


def with_distributed_activations(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    shards = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    fold = backfold.Controller(bits=4, min_bytes=0, adaptive=False)
    with fold:
        loss = (shards * 2).tanh().square().sum()
    loss.backward()
    expected = x.clone().requires_grad_()
    (expected * 2).tanh().square().sum().backward()
    sites = fold.report().to_dict()["sites"]
    sites = [site for site in sites if site["reason"] == "tensor subclass"]
    return torch.allclose(shards.grad.full_tensor(), expected.grad), sites


def test_distributed_activations_pass_through_and_are_named():
    for same, sites in returned(run(with_distributed_activations, 2)):
        assert same
        assert {site["kind"] for site in sites} == {"passed"}
        assert sum(site["saved_bytes"] for site in sites) > 0
