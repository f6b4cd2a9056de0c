# SPDX-License-Identifier: Apache-2.0
"""The timeline of one step: how much is kept for backward, from save to save and read to read."""

import backfold
import pytest
import torch
from small_network import batch, network
from torch import nn

CURVES = ("plain_bytes", "held_bytes", "made_bytes")


def phase_of(timeline: dict, event: int) -> str:
    return [one["phase"] for one in timeline["phases"] if one["from"] <= event][-1]


def run(model: nn.Module, fold: backfold.Controller, x: torch.Tensor, steps: int = 2) -> dict:
    for _ in range(steps):
        with fold:
            loss = model(x * 2).square().mean()
        loss.backward()
        del loss
    return fold.report().to_dict()


@pytest.mark.parametrize("options", [{"bits": None}, {"bits": 4}, {"bits": 4, "derive": False}])
def test_curves_rise_to_what_forward_keeps_and_fall_to_nothing(device, options):
    model, x = network(device), batch(device, rows=256)
    report = run(model, backfold.Controller(model, min_bytes=0, **options), x)
    timeline = report["timeline"]
    assert [one["phase"] for one in timeline["phases"]] == ["forward", "backward"]
    end_of_forward = timeline["phases"][1]["from"] - 1
    for curve, total in (("plain_bytes", "unique_bytes"), ("held_bytes", "held_bytes")):
        assert timeline[curve][end_of_forward] == report[total] > 0
        assert max(timeline[curve]) == report[total]
        assert timeline[curve][-1] == 0
    assert timeline["carried"] == {"plain_bytes": 0, "held_bytes": 0}
    assert len({len(timeline[curve]) for curve in (*CURVES, "site")}) == 1
    assert timeline["events_seen"] == len(timeline["site"])


def test_peaks_are_named(device):
    model, x = network(device), batch(device, rows=256)
    report = run(model, backfold.Controller(model, bits=4, min_bytes=0), x)
    timeline, peak = report["timeline"], report["timeline"]["peak"]
    folded = [a + b for a, b in zip(timeline["held_bytes"], timeline["made_bytes"], strict=True)]
    curves = {"plain": timeline["plain_bytes"], "held": timeline["held_bytes"], "folded": folded}
    for name, curve in curves.items():
        assert peak[name]["bytes"] == max(curve) == curve[peak[name]["event"]]
        assert peak[name]["phase"] == phase_of(timeline, peak[name]["event"])
        assert peak[name]["site"] == timeline["site"][peak[name]["event"]]
    # Backward decodes one tensor at a time beside what is still held.
    assert peak["plain"]["phase"] == "forward"
    assert peak["folded"]["phase"] == "backward"
    assert 0 < max(timeline["made_bytes"]) < report["unique_bytes"]


def test_what_a_step_leaves_behind_is_carried_into_the_next():
    model, x = network(), batch(rows=256)
    fold = backfold.Controller(model, bits=4, min_bytes=0, adaptive=False)
    losses = []
    for _ in range(2):
        with fold:
            losses.append(model(x * 2).square().mean())
    report = fold.report().to_dict()
    timeline = report["timeline"]
    assert timeline["carried"]["held_bytes"] == report["held_bytes"]
    assert timeline["peak"]["held"]["bytes"] == 2 * report["held_bytes"]
    sum(losses).backward()
    after = fold.report().to_dict()["timeline"]
    assert after["plain_bytes"][-1] == after["held_bytes"][-1] == 0
    assert None in after["site"] or set(after["site"]) <= set(range(len(report["sites"])))


def test_a_graph_that_is_read_twice_stays_until_it_is_let_go():
    model, x = network(), batch(rows=256)
    fold = backfold.Controller(model, bits=4, min_bytes=0, adaptive=False)
    with fold:
        loss = model(x * 2).square().mean()
    loss.backward(retain_graph=True)
    report = fold.report().to_dict()
    assert report["timeline"]["held_bytes"][-1] == report["held_bytes"]
    loss.backward()
    assert fold.report().to_dict()["timeline"]["held_bytes"][-1] == 0


def test_inspect_has_a_timeline_of_forward():
    model, x = network(), batch()
    timeline = backfold.inspect(lambda: model(x * 2).sum(), model).to_dict()["timeline"]
    assert [one["phase"] for one in timeline["phases"]] == ["forward"]
    assert timeline["plain_bytes"] == sorted(timeline["plain_bytes"])


def test_there_is_no_timeline_before_the_first_step():
    assert backfold.Controller(bits=4).report().to_dict()["timeline"] is None


def test_the_format_is_named():
    assert backfold.Controller(bits=4).report().to_dict()["format"] == 1
