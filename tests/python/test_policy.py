# SPDX-License-Identifier: Apache-2.0
"""Codecs for chosen places: selectors, presets, and what a report says about them."""

import os
import subprocess
import sys
import warnings
from contextlib import nullcontext

import backfold
import pytest
import torch
from backfold import codecs
from states import tensor_in
from test_plan import train
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("one_thread")


class Network(nn.Module):
    """Maps, then a matrix; a GELU and a SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Sequential(nn.Linear(8, 64), nn.GELU("tanh"), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def network(device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Network().to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, 16, 16, generator=generator).to(device)
    y = torch.randint(10, (16,), generator=generator).to(device)
    return model, x, y


def kinds(fold) -> dict[tuple[str, str], str]:
    """How each module and operator keeps the largest tensor it saves."""
    found: dict[tuple[str, str], str] = {}
    for site in fold.report().to_dict()["sites"]:  # largest first
        if site["kind"] not in ("parameter", "shared", "geometry"):
            found.setdefault((site["module"], site["op"].removeprefix("aten::")), site["kind"])
    return found


def test_the_first_selector_that_matches_wins(device):
    model, x, y = network(device)
    fold = backfold.Controller(
        model,
        bits=4,
        min_bytes=0,
        codec={
            "body.0": codecs.Keep(),
            nn.Conv2d: codecs.PoolResidual(4, 2),
            "aten::gelu": codecs.FewBit(3),
            codecs.Where("stem.*", dtype=torch.float32): codecs.Pool(2),
        },
    )
    train(fold, model, x, y, 3)
    found = kinds(fold)
    assert found["body.0", "convolution"] == "passed"
    assert found["body.2", "convolution"] == "pooled and residual"
    assert found["body.1", "gelu"] == found["head.1", "gelu"] == "few bit"
    assert found["stem.1", "silu"] == "pooled"
    assert found["head.2", "addmm"] == "lossy"  # the plan's
    reasons = {site["reason"] for site in fold.report().to_dict()["sites"]}
    assert "Pool(block=2), biased" in reasons and "PoolResidual(block=4, bits=2)" in reasons


def test_a_codec_for_everything_leaves_to_the_plan_what_it_does_not_fit(device):
    model, x, y = network(device)
    fold = backfold.Controller(model, codec=codecs.PoolResidual(4, 4), min_bytes=0)
    folded = train(fold, model, x, y, 3)
    found = kinds(fold)
    assert found["body.1", "gelu"] == "pooled and residual"
    assert found["head.1", "gelu"] == "lossy"
    plain = train(nullcontext(), model, x, y, 1)
    for a, b in zip(folded, plain, strict=True):
        assert (a - b).norm() < 0.2 * b.norm() + 1e-3


def test_small_tensors_are_left_out_by_size(device):
    model, x, y = network(device)
    rule = {codecs.Where(min_bytes=100_000): codecs.Exact()}
    fold = backfold.Controller(model, bits=2, adaptive=False, codec=rule, min_bytes=0)
    train(fold, model, x, y, 3)
    assert kinds(fold)["stem.1", "silu"] == "raw"
    assert kinds(fold)["head.1", "gelu"] == "lossy"


def test_a_selector_that_matched_nothing_is_named_once():
    model, x, y = network("cpu")
    fold = backfold.Controller(model, codec={"haed.*": codecs.Keep(), "aten::gelu": codecs.Exact()})
    with pytest.warns(UserWarning, match=r"matches Where\(module='haed\.\*'"):
        train(fold, model, x, y, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(fold, model, x, y, 1)


def test_a_codec_that_does_not_fit_where_it_was_asked_for_is_an_error():
    model, x, y = network("cpu")
    fold = backfold.Controller(model, codec={"head.*": codecs.Pool(4)}, min_bytes=0)
    with pytest.raises(ValueError, match=r"Pool\(block=4\) takes tensors of 3 to 5 dimensions"):
        train(fold, model, x, y, 1)
    # The block ended; another may begin.
    with pytest.raises(ValueError, match=r"saved by aten::\w+ \(\w+\) in head"):
        train(fold, model, x, y, 1)


@pytest.mark.parametrize(
    ("codec", "error", "message"),
    [
        ({"body[": codecs.Keep()}, ValueError, "has a '[' without a ']'"),
        ({"": codecs.Keep()}, ValueError, "must be a pattern of paths"),
        ({3: codecs.Keep()}, TypeError, "a selector must be a pattern of module paths"),
        ({"body": "pool"}, TypeError, "the value for 'body' must be a codec, got 'pool'"),
        ("pool", TypeError, "codec must be a codec or a mapping"),
        ({codecs.Where: codecs.Keep()}, TypeError, "a selector must be"),
    ],
)
def test_bad_selectors_are_refused_before_anything_happens(codec, error, message):
    with pytest.raises(error) as raised:
        backfold.Controller(nn.Linear(4, 4), codec=codec)
    assert message in str(raised.value)


def test_bad_parts_of_a_selector_are_refused():
    with pytest.raises(ValueError, match="op must include the namespace"):
        codecs.Where(op="gelu")
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype"):
        codecs.Where(dtype="float32")
    with pytest.raises(ValueError, match="min_bytes must be 0 or more, got -1"):
        codecs.Where(min_bytes=-1)


PRESETS = {
    "actnn-L1": ("lossy", "raw"),
    "actnn-L2": ("lossy", "lossy"),
    "actnn-L3": ("per sample", "per sample"),
    "actnn-L4": ("per sample", "per sample"),
    "pooled": ("pooled", "raw"),
    "division": ("pooled and residual", "pooled and residual"),
    "mesa": ("running range", "running range"),
    "exact-project": ("raw", "raw"),
}


@pytest.mark.parametrize(("level", "wanted"), PRESETS.items(), ids=str)
def test_presets_fold_what_their_papers_do(device, level, wanted):
    model, x, y = network(device)
    fold = backfold.Controller(model, level=level, min_bytes=4096)
    train(fold, model, x, y, 3)
    found = kinds(fold)
    # A convolution's input of its own, and the input of an activation.
    assert (found["body.0", "convolution"], found["body.1", "gelu"]) == wanted
    assert ("projected" in found.values()) == (level == "exact-project")


def test_a_tensor_that_is_only_too_small_stays_with_the_plan():
    model = nn.Sequential(nn.Conv2d(8, 64, 1), nn.SiLU(), nn.Conv2d(64, 8, 1))
    fold = backfold.Controller(model, codec={"aten::convolution": codecs.Pool(4)}, min_bytes=0)
    with fold:
        loss = model(torch.randn(64, 8, 1, 1)).square().mean()
    loss.backward()
    assert kinds(fold)["2", "convolution"] == "lossy"


def test_actnn_without_fragments_keeps_what_actnn_offloads(device):
    found = {}
    for level in ("actnn-L4", "actnn-L5"):
        model, x, y = network(device)
        fold = backfold.Controller(model, level=level, min_bytes=0)
        train(fold, model, x, y, 4)
        report = fold.report().to_dict()
        found[level] = (kinds(fold), report["held_bytes"] + report["offloaded_bytes"])
    assert found["actnn-L5"] == found["actnn-L4"]
    assert "per sample" in found["actnn-L5"][0].values()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="segments are a GPU's")
@pytest.mark.parametrize("settings", ["", "max_split_size_mb:512"])
@pytest.mark.parametrize("options", ["defragment=True", "level='actnn-L5'"])
def test_segments_of_a_gpu_expand(options, settings):
    program = f"""
import torch, backfold
before = torch.ones(1 << 22, device="cuda")
backfold.Controller({options})
after = torch.ones(1 << 24, device="cuda")
found = torch.cuda.memory._snapshot()
by_address = {{one["address"]: one["is_expandable"] for one in found["segments"]}}
print(by_address[before.data_ptr()], by_address[after.data_ptr()])
print(found["allocator_settings"]["max_split_size"] >> 20)
assert before.sum() + after.sum() == (1 << 22) + (1 << 24)
"""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    expanding, split = ran.stdout.splitlines()
    assert expanding == "False True"
    assert (split == "512") == bool(settings)


def test_presets_that_are_misused_say_so():
    with pytest.raises(ValueError, match=r"level must be one of .*actnn-L3.*division"):
        backfold.Controller(level="actnn-L7")
    with pytest.raises(ValueError, match="'mesa' sets its own codec"):
        backfold.Controller(level="mesa", codec=codecs.Keep())
    with pytest.raises(TypeError, match="defragment must be True or False, got 1"):
        backfold.Controller(defragment=1)


def test_widths_of_samples_are_shared_out_by_what_was_measured(device):
    model, x, y = network(device)
    x = x * torch.logspace(-1, 1, 16, device=device).view(-1, 1, 1, 1)
    codec = codecs.Quantize(2, per_sample=True)
    errors = {}
    plain = train(nullcontext(), model, x, y, 1)
    for steps in ((), (2,)):
        fold = backfold.Controller(
            model, bits=2, codec=codec, min_bytes=4096, probe_steps=steps, probe_every=None
        )
        train(fold, model, x, y, 4)
        shares = [site["shares"] for site in fold.state_dict()["sites"] if any(site["shares"])]
        assert bool(shares) == bool(steps)
        for share in shares:
            assert sum(share) == pytest.approx(1)
        draws = [train(fold, model, x, y, 1) for _ in range(12)]
        errors[steps] = sum(
            (a - b).square().sum().item()
            for draw in draws
            for a, b in zip(draw, plain, strict=True)
        )
    assert any(max(share) < 1 for share in shares)
    assert errors[2,] < 0.7 * errors[()]


def test_a_plan_takes_from_the_menu_what_is_worth_its_bytes(device):
    class Smooth(nn.Module):
        """Maps of blocks that are nearly constant, and a matrix of noise; products read both."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, 1, 1))
            self.mix = nn.Parameter(torch.ones(64))

        def forward(self, maps, noise):
            mapped = functional.interpolate(maps, scale_factor=8) + 0.02 * grain
            return (mapped * self.scale).square().mean() + (noise.sin() * self.mix).square().mean()

    model = Smooth().to(device)
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(8, 8, 4, 4, generator=generator).to(device).requires_grad_()
    grain = torch.randn(8, 8, 32, 32, generator=generator).to(device)
    noise = torch.randn(512, 64, generator=generator).to(device).requires_grad_()
    plans = {}
    for menu in ((), (codecs.PoolResidual(8, 2), codecs.Project(8, 2))):
        fold = backfold.Controller(model, bits=3, menu=menu, min_bytes=0, derive=False)
        for _ in range(5):
            with fold:
                loss = model(maps, noise)
            loss.backward()
        plans[bool(menu)] = fold.plan()["sites"]
        assert fold.report().to_dict()["plan"]["mean_bits"] <= 3
    assert not any("codec" in site for site in plans[False].values())
    chosen = {site.get("codec") for site in plans[True].values()}
    assert "PoolResidual(block=8, bits=2)" in chosen and None in chosen
    assert "pooled and residual" in kinds(fold).values()
    state = fold.state_dict()
    again = backfold.Controller(model, bits=3, menu=menu, min_bytes=0)
    again.load_state_dict(state)
    assert again.plan() == fold.plan()
    with pytest.raises(ValueError, match=r"codec of .* must be one of menu=\[\], got Pool"):
        backfold.Controller(model, plan=fold.plan())


def test_what_may_not_be_on_a_menu_is_refused():
    with pytest.raises(ValueError, match=r"got Pool\(block=4\), a biased codec"):
        backfold.Controller(menu=[codecs.Pool(4)])
    with pytest.raises(TypeError, match="menu must hold codecs"):
        backfold.Controller(menu=["pool"])


def test_samples_are_ranked_by_their_own_last_gradients(device):
    """All samples have the same range; those with large gradients deserve the wide codes."""
    torch.manual_seed(0)
    layer = nn.Linear(512, 512).to(device)
    x = torch.randn(16, 512, device=device)
    weight = torch.logspace(-2, 1, 16, device=device).view(-1, 1)
    ids = torch.arange(16) + 100

    def loss():
        return (layer(x * 1.0).tanh() * weight).sum()

    def step(fold):
        layer.zero_grad()
        with fold:
            result = loss()
        result.backward()
        return layer.weight.grad.clone()

    plain = step(nullcontext())
    codec = codecs.Quantize(2, per_sample=True)
    errors = {}
    for known in (False, True):
        fold = backfold.Controller(layer, bits=2, codec=codec, min_bytes=0, probe_steps=(3,))
        for _ in range(5):
            if known:
                fold.sample_ids(ids, 200)
            step(fold)
        norms = [site["norms"] for site in fold.state_dict()["sites"] if site["norms"] is not None]
        assert bool(norms) == known
        for one in norms:
            table = tensor_in(one)
            assert table[100:116].all() and not table[:100].any()
        errors[known] = 0.0
        for _ in range(20):
            if known:
                fold.sample_ids(ids, 200)
            errors[known] += (step(fold) - plain).square().sum().item()
    assert errors[True] < 0.5 * errors[False]


def test_widths_of_samples_follow_a_calibration(device):
    # calibrate() packs nothing: ranges of samples are those of the step after it.
    model, x, y = network(device)
    x = x * torch.logspace(-3, 0, len(x), device=device).view(-1, *[1] * (x.dim() - 1))
    fold = backfold.Controller(model, level="actnn-L3", min_bytes=0, probe_steps=())
    fold.calibrate(lambda: nn.functional.cross_entropy(model(x), y).backward())
    resumed = backfold.Controller(model, level="actnn-L3", min_bytes=0, probe_steps=())
    resumed.load_state_dict(fold.state_dict())
    train(resumed, model, x, y, 1)
    train(fold, model, x, y, 1)
    shares = [site["shares"] for site in fold.state_dict()["sites"] if any(site["shares"])]
    assert shares and any(max(share) < 1 for share in shares)
    again = [site["shares"] for site in resumed.state_dict()["sites"] if any(site["shares"])]
    assert again == shares


def test_bad_sample_ids_are_refused():
    fold = backfold.Controller()
    with pytest.raises(TypeError, match="ids must be an int64 tensor of one dimension"):
        fold.sample_ids([1, 2], 4)
    with pytest.raises(TypeError, match=r"of one dimension, got torch.FloatTensor of 2"):
        fold.sample_ids(torch.ones(1, 1), 4)
    with pytest.raises(ValueError, match="ids must be from 0 to 3, got 1 to 4"):
        fold.sample_ids(torch.tensor([1, 4]), 4)
    with pytest.raises(ValueError, match="count must be an int of 1 or more, got 0"):
        fold.sample_ids(torch.tensor([1]), 0)


def test_ids_for_another_batch_are_told():
    model, x, y = network("cpu")
    fold = backfold.Controller(model, level="actnn-L3", min_bytes=0)
    fold.sample_ids(torch.arange(15), 100)
    with pytest.warns(UserWarning, match="as many samples as sample_ids"):
        train(fold, model, x, y, 1)


def test_what_codecs_remember_is_resumed(device):
    model, x, y = network(device)
    first = backfold.Controller(model, codec=codecs.RunningRange(8), bits=None, min_bytes=0)
    train(first, model, 3 * x, y, 2)
    second = backfold.Controller(model, codec=codecs.RunningRange(8), bits=None, min_bytes=0)
    second.load_state_dict(first.state_dict())
    for a, b in zip(train(first, model, x, y, 1), train(second, model, x, y, 1), strict=True):
        # Convolutions on a GPU add in no fixed order; different packets would differ by percents.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
