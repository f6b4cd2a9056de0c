# SPDX-License-Identifier: Apache-2.0
"""What reports say: kinds, sums, reasons; backfold.inspect."""

import json

import backfold
import pytest
import torch
from derivation_layers import HandWrittenGelu
from torch import nn
from torch.nn import functional

PACKED = {"lossy", "zero-exact", "predicate", "bits", "mask", "indices"}
KINDS = PACKED | {"geometry", "alive", "shared", "derived", "parameter", "parameter copy"}
KINDS |= {"raw", "passed"}


def cnn(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ).to(device)


def sites(report: backfold.Report, **values) -> list[dict]:
    return [
        site
        for site in report.to_dict()["sites"]
        if all(site[name] == value for name, value in values.items())
    ]


def after(steps: int, fold: backfold.Controller, forward) -> backfold.Report:
    """The report after some steps; backward reads what was saved, so that the store learns."""
    for _ in range(steps):
        with fold:
            loss = forward().float().square().mean()
        loss.backward()
    return fold.report()


def plain_bytes(model: nn.Module, forward) -> tuple[int, int]:
    """What autograd keeps apart from parameters, per save and per storage, without Backfold."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saves, storages = [], {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saves.append(tensor.nbytes)
            storages[storage._cdata] = (storage.nbytes(), tensor)  # alive: no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(saves), sum(nbytes for nbytes, _ in storages.values())


@pytest.mark.parametrize("bits", [None, 4])
def test_what_derived_tensors_spare(device, bits):
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU())
    model = nn.Sequential(model, nn.Linear(512, 64), cnn(device)[2], nn.Linear(64, 8)).to(device)
    x = torch.randn(64, 64, device=device)
    reports = []
    for derive in (True, False):
        fold = backfold.Controller(model, bits=bits, min_bytes=0, adaptive=False, derive=derive)
        reports.append(after(2, fold, lambda: model(x)))
    totals, stored = (report.to_dict() for report in reports)
    assert totals["held_bytes"] + totals["spared_bytes"] == stored["held_bytes"]
    assert stored["spared_bytes"] == stored["spared_ms"] == 0
    derived = sites(reports[0], kind="derived")
    assert {site["recipe"] for site in derived} >= {"gelu", "native_layer_norm"}
    for site in derived:
        # Without rounding there would be nothing to pack: running again is all that is added.
        assert site["spared_bytes"] > 0 and (site["spared_ms"] < 0 or bits)
    assert totals["spared_ms"] == pytest.approx(sum(site["spared_ms"] for site in derived))
    assert "derived tensors: " in str(reports[0]) and " ms " in str(reports[0])
    assert "derived" not in str(reports[1])


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128), nn.Linear(64, 128)

    def forward(self, x):
        return functional.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize(
    ("layer", "beside"),
    [
        (nn.Sequential(nn.Linear(64, 128), nn.GELU()), 0),
        (Gated(), 1),  # the activation
        # x / 2 and, of the other factor, an argument and its result.
        (nn.Sequential(nn.Linear(64, 128), HandWrittenGelu()), 2),
    ],
    ids=["gelu", "gated", "by hand"],
)
def test_what_is_allocated_beside_a_derived_tensor(device, layer, beside):
    model = nn.Sequential(layer, nn.Linear(128, 8)).to(device)
    x = torch.randn(256, 64, device=device)
    fold = backfold.Controller(model, bits=None, min_bytes=0)
    report = after(1, fold, lambda: model(x))
    (site,) = sites(report, module="1", kind="derived")
    assert site["transient_bytes"] == beside * 256 * 128 * 4


def test_sums_agree_with_a_count_of_what_autograd_saves(device):
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.GELU()).to(device)
    x = torch.randn(32, 64, device=device)

    def forward():
        return model(x).exp().sum()

    fold = backfold.Controller(model, min_bytes=0)
    with fold:
        forward()
    for report in (fold.report(), backfold.inspect(forward)):
        totals = report.to_dict()
        assert (totals["saved_bytes"], totals["unique_bytes"]) == plain_bytes(model, forward)


def test_sums_are_those_of_the_sites(device):
    model, x = cnn(device), torch.randn(4, 3, 16, 16, device=device)
    fold = backfold.Controller(model, min_bytes=0)
    for step in range(1, 4):
        report = after(1, fold, lambda: model(x * 2))
        totals = report.to_dict()
        assert totals["step"] == step
        own = [site for site in totals["sites"] if site["kind"] != "parameter"]
        for name in ("saved_bytes", "unique_bytes", "held_bytes"):
            assert totals[name] == sum(site[name] for site in own)
        assert totals["held_bytes"] <= totals["unique_bytes"] <= totals["saved_bytes"]
        for site in totals["sites"]:
            assert site["kind"] in KINDS and site["saves"] >= 1
            assert site["held_bytes"] + site["duplicate_bytes"] <= site["saved_bytes"]
            assert site["kind"] not in ("raw", "passed", "geometry", "alive") or site["reason"]
        assert json.loads(report.to_json()) == totals
        assert "relu" in str(report) and len(str(report).splitlines()) > 8
        held = [site["held_bytes"] for site in totals["sites"]]
        assert held == sorted(held, reverse=True)  # largest first


def test_stored_bits_are_what_is_held(device):
    model, x = cnn(device), torch.randn(4, 3, 16, 16, device=device)
    report = after(3, backfold.Controller(model, min_bytes=0), lambda: model(x * 2))
    packed = [site for site in report.to_dict()["sites"] if site["kind"] in PACKED]
    assert {site["kind"] for site in packed} >= {"lossy", "zero-exact", "predicate", "indices"}
    for site in packed:
        elements = site["saved_bytes"] // (8 if site["kind"] == "indices" else 4)
        elements = site["saved_bytes"] if site["kind"] == "bits" else elements
        assert site["stored_bits"] == pytest.approx(8 * site["held_bytes"] / elements, abs=0.01)
        assert site["bits"] <= site["stored_bits"]


def test_kinds_of_a_cnn(device):
    model, x = cnn(device), torch.randn(4, 3, 16, 16, device=device)
    report = after(3, backfold.Controller(model, min_bytes=0), lambda: model(x * 2))

    def kind(module: str, op: str, slot: str = "") -> str:
        (site,) = (
            s for s in sites(report, module=module) if op in s["op"] and s["slot"].startswith(slot)
        )
        return site["kind"]

    assert kind("2", "relu") == "predicate"  # the pool reads only its sizes
    assert kind("5", "relu") == "zero-exact" and kind("6", "conv", "input") == "shared"
    assert kind("3", "max_pool", "self") == "geometry"
    assert kind("3", "max_pool", "result") == "indices"
    assert kind("0", "conv", "weight") == "parameter"
    assert kind("9", "addmm", "mat2") == "parameter"
    assert kind("7", "mul" if device == "cpu" else "dropout") in ("mask", "bits")
    assert {s["kind"] for s in sites(report, module="1") if s["slot"] == "input"} == {"lossy"}
    statistics = [s for s in sites(report, module="1") if s["slot"].startswith("result")]
    # cuDNN's reserve is empty here, and passed through.
    assert {s["kind"] for s in statistics if s["saved_bytes"]} == {"raw"}


def test_one_packet_serves_all_who_save_a_tensor(device):
    heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)).to(device)
    x = torch.randn(128, 64, device=device)

    def forward():
        h = (x * 2).tanh()
        return sum(head(h) for head in heads)

    report = after(2, backfold.Controller(heads, min_bytes=0), forward)
    inputs = sites(report, slot="mat1")
    assert sorted(site["kind"] for site in inputs) == ["lossy", "shared", "shared"]
    assert sum(site["duplicate_bytes"] for site in inputs) == 2 * x.nbytes
    assert sum(site["unique_bytes"] for site in inputs) == x.nbytes


def test_what_is_alive_anyway_is_held_by_reference_and_packed_again_when_it_is_not(device):
    model = nn.Linear(64, 64).to(device)
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    x = torch.randn(128, 64, device=device)

    def step(box, release):  # an argument itself may be the caller's as well (as Dynamo's is)
        with fold:
            loss = model(box[0]).square().sum()
        expected = torch.autograd.grad(model(box[0]).square().sum(), model.weight)[0]
        if release:
            box.clear()
        (found,) = torch.autograd.grad(loss, model.weight)
        (site,) = sites(fold.report(), slot="mat1")
        return site, ((found - expected).norm() / expected.norm()).item()

    step([x], release=False)
    site, _ = step([x], release=False)
    assert (site["kind"], site["held_bytes"]) == ("alive", 0)
    step([x.clone()], release=True)  # held by a reference: nothing can be lost
    for _ in range(4):
        site, error = step([x.clone()], release=True)
        assert error < 0.3  # a freed tensor could hold anything
    assert site["kind"] == "lossy" and 0 < site["held_bytes"] < x.nbytes // 6


def test_what_is_alive_for_one_reader_is_held_for_another_that_needs_it(device):
    x = torch.rand(512, 512, device=device).add_(1).requires_grad_()
    fold = backfold.Controller(bits=4, adaptive=False, derive=False)
    for _ in range(2):
        with fold:
            y = x @ x.detach()
            loss = functional.gelu(y).sum() + torch.log(y).sum()
        del y
        # GELU finds its input alive, because the logarithm's graph, which is kept, has it.
        loss.backward(retain_graph=True)
    rows = {row["op"]: row for row in fold.report().to_dict()["sites"]}
    assert rows["aten::gelu"]["kind"] == "alive"
    assert rows["aten::log"]["held_bytes"] == x.nbytes  # 0 if the first save decides


def test_masks_and_indices(device):
    words, layer = torch.randint(100, (64, 32), device=device), nn.Embedding(100, 32).to(device)

    def forward():
        h = layer(words + 0).tanh()
        h = h.masked_fill(h * 2 > 1, 0.5) + functional.hardtanh(h * 3) + (h * 3).clamp(-1, 2)
        return torch.where(h.sin() > 0, h, -h)

    report = after(3, backfold.Controller(layer, min_bytes=0), forward)
    kinds = {(site["op"].removeprefix("aten::"), site["kind"]) for site in sites(report)}
    assert {("embedding", "indices"), ("masked_fill", "bits"), ("where", "bits")} <= kinds
    assert {("hardtanh", "predicate"), ("clamp", "predicate")} <= kinds


def test_queries_and_keys_have_at_least_six_bits(device):
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True).to(device)
    x = torch.randn(4, 128, 64, device=device)
    report = after(2, backfold.Controller(layer, bits=4, min_bytes=0), lambda: layer(x * 2))
    attention = [site for site in sites(report) if "scaled_dot_product" in site["op"]]
    assert attention
    for site in attention:
        assert site["slot"] not in ("query", "key") or site["bits"] >= 6 or site["kind"] == "raw"
        assert site["slot"] != "value" or site["bits"] == 4 or site["kind"] == "shared"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_copies_of_weights_are_not_held(device, dtype):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    x = torch.randn(32, 64, device=device)

    def forward():
        with torch.autocast(device, dtype):
            return model(x * 2)

    report = after(2, backfold.Controller(model, bits=4, min_bytes=0), forward)
    copies = sites(report, kind="parameter copy")
    assert sum(site["saved_bytes"] for site in copies) == 256 * 64 * 2  # the second layer's
    assert all(site["held_bytes"] == 0 for site in copies)


def test_reading_a_predicate_outside_of_backward_raises_and_says_why(device):
    x = torch.randn(64, 64, device=device, requires_grad=True)
    fold = backfold.Controller(bits=4, min_bytes=0)
    for _ in range(3):
        with fold:
            h = (x * 2).relu()
            out = functional.max_pool1d(h.unsqueeze(0), 2).sum()
        relu = h.grad_fn
        del h
        (found,) = torch.autograd.grad(out, x, retain_graph=True)
    assert sites(fold.report(), kind="predicate")
    with pytest.raises(RuntimeError, match=r"one bit per element.*outside of backward"):
        _ = relu._saved_result
    assert torch.equal(found, torch.autograd.grad(out, x)[0])  # and no harm was done


def test_inspect_compresses_nothing_and_takes_any_callable(device):
    x = torch.randn(64, 64, device=device, requires_grad=True)
    state, outs = torch.get_rng_state(), []
    report = backfold.inspect(lambda: outs.append((x * 2).exp().relu().tanh().sum()))
    totals = report.to_dict()
    assert totals["held_bytes"] <= totals["unique_bytes"] <= totals["saved_bytes"]
    assert not PACKED & {site["kind"] for site in totals["sites"]}
    assert {"aten::exp", "aten::relu", "aten::tanh"} <= {site["op"] for site in totals["sites"]}
    (found,) = torch.autograd.grad(outs[0], x)
    assert torch.equal(found, torch.autograd.grad((x * 2).exp().relu().tanh().sum(), x)[0])
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ZeroDivisionError):
        backfold.inspect(lambda: 1 / 0)
    with pytest.raises(TypeError, match="fn must be callable, got Tensor"):
        backfold.inspect(x)


def test_a_report_before_the_first_step_is_empty():
    report = backfold.Controller().report()
    assert report.to_dict()["sites"] == [] and report.to_dict()["step"] == 0
    assert "step 0" in str(report)


def test_inspect_says_what_could_be_made_again(device):
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)).to(device)
    x = torch.randn(512, 8, device=device)
    report = backfold.inspect(lambda: model(x).square().mean(), model)
    (line,) = (line for line in str(report).splitlines() if line.startswith("2 "))
    assert line.endswith("raw: made again by gelu")


def test_inspect_sees_functions_and_compiled_graphs(device):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    x = torch.randn(64, 64, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin().exp(), backend="aot_eager")
    # torch asks whoever counts allocations for a profiler's settings when a Function is applied.
    report = backfold.inspect(lambda: (compiled(x), Square.apply(x * 2)))
    assert {"CompiledFunction", "Square"} <= {site["op"] for site in report.to_dict()["sites"]}
