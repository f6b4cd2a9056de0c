# SPDX-License-Identifier: Apache-2.0
"""What a step allocates on the CPU, as torch's profiler counts it."""

from torch.profiler import ProfilerActivity, profile


def peak_of(step) -> int:
    """Peak allocation on the CPU in a step, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    now = most = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
