# SPDX-License-Identifier: Apache-2.0
"""Cost of the workloads without Backfold, and Backfold's targets.

Given figures: one NVIDIA H200, torch 2.11, TF32 on, median of 8 steps after 3 warm-up steps. `gact`
is GACT's own code (ICML 2022) at a fixed 4 bits, ported to that torch; it does not support bf16.
`checkpoint` is torch's non-reentrant checkpoint around every residual block, Swin block, encoder or
decoder layer. `floor` is the peak of `save_on_cpu`: what a step needs when nothing is held on the
GPU.

Targets are for 4 bits on the same machine.
"""

import typing


class Cost(typing.NamedTuple):
    step_ms: float
    held_mib: float  # allocated after forward minus before
    peak_mib: float  # most allocated at once during the step


class Figures(typing.NamedTuple):
    plain: Cost
    checkpoint: Cost | None = None
    gact: Cost | None = None
    floor: float | None = None
    held_target: float | None = None  # MiB, at most
    ratio_target: float | None = None  # step time / plain's, at most
    peak_target: bool = False  # peak below those of checkpoint and gact


FIGURES = {
    "resnet50": Figures(
        plain=Cost(60, 10428, 10769),
        checkpoint=Cost(77, 3727, 4657),
        gact=Cost(110, 2278, 3369),
        floor=2108,
        held_target=1450,
        ratio_target=1.15,
        peak_target=True,
    ),
    "swin_t": Figures(
        plain=Cost(51, 6495, 6783),
        checkpoint=Cost(82, 695, 2206),
        gact=Cost(76, 949, 1590),
        held_target=880,
        ratio_target=1.20,
        peak_target=True,
    ),
    "bert": Figures(
        plain=Cost(101, 12759, 14309),
        checkpoint=Cost(144, 840, 3192),
        gact=Cost(152, 2350, 4083),
        floor=2887,
        held_target=1850,
        ratio_target=1.12,
    ),
    "bert_eager": Figures(
        plain=Cost(102, 19659, 21208),
        checkpoint=Cost(155, 840, 3479),
        gact=Cost(167, 3820, 5642),
        floor=3067,
        held_target=2750,
        ratio_target=1.12,
    ),
    "gpt2": Figures(
        plain=Cost(120, 18828, 23389),
        checkpoint=Cost(171, 2493, 7054),
        floor=6132,
        held_target=3650,
        ratio_target=1.15,
    ),
    "llama": Figures(
        plain=Cost(314, 32224, 38388),
        checkpoint=Cost(399, 3665, 9829),
        held_target=8000,
        ratio_target=1.10,
    ),
    "gcn": Figures(
        plain=Cost(23, 1178, 3697),
        gact=Cost(27, 299, 3433),
        floor=5908,  # above plain: what comes back from the host is a copy of a live tensor
        held_target=190,
    ),
    "gpt2_tf32": Figures(
        plain=Cost(187, 23546, 28107),
        checkpoint=Cost(238, 2411, 6972),
        gact=Cost(270, 3791, 9504),
    ),
}
