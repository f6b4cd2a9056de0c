# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a step, not only what is held between forward and backward."""

import backfold
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

ELEMENTS = 512 * 1024


def peak_bytes(x: torch.Tensor, retain_graph: bool) -> int:
    """Peak allocation on the CPU in a forward and backward that packs one tensor."""
    fold = backfold.Controller(bits=4, min_bytes=0, derive=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        with fold:
            loss = torch.nn.functional.gelu(x * 2).sum()
        loss.backward(retain_graph=retain_graph)
    x.grad = None
    now = most = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.filterwarnings("ignore")
def test_a_packet_goes_when_its_last_reader_has_it():
    # At the peak gelu's backward has its decoded input and two gradients. The packet would be a
    # fourth item, and stays only if the graph is retained.
    x = torch.randn(512, 1024, requires_grad=True)
    peak_bytes(x, retain_graph=False)
    packet = ELEMENTS * 4.25 / 8
    assert peak_bytes(x, retain_graph=True) - peak_bytes(x, retain_graph=False) == packet
    assert peak_bytes(x, retain_graph=False) <= 3 * 4 * ELEMENTS + 1024
