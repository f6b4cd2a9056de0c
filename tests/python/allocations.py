# SPDX-License-Identifier: Apache-2.0
"""What a step allocates on the CPU, as torch's profiler counts it."""

import itertools

from torch.profiler import ProfilerActivity, profile


def _taken_during(step) -> list[int]:
    """What is allocated beyond what there was before, from event to event."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    events = run.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return list(itertools.accumulate(sizes, initial=0))


def peak_of(step) -> int:
    """Peak allocation on the CPU in a step, beyond what there was before."""
    return max(_taken_during(step))


def left_by(step) -> int:
    """What a step allocated on the CPU and did not free."""
    return _taken_during(step)[-1]
