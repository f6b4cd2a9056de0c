# SPDX-License-Identifier: Apache-2.0
"""Longer answers about a folded step: where its bytes are, where its time goes."""

import collections
import contextlib
import re

import measure
from models import Workload
from rows import say

PROFILE_ROWS = 30
NAMESPACES = re.compile(r"void |at::native::|backfold::(core|cuda)::|\(anonymous namespace\)::")


def say_report(sites: list[dict], count: int) -> None:
    """The largest rows of the report, summed over modules, then one by one."""
    mib = measure.MIB
    heading = f"{'saves':>7}{'saved':>10}{'unique':>10}{'held':>10}  MiB, kind, bits, reason"
    for keys in (("op", "slot"), ("module", "op", "slot", "occurrence")):
        sums: dict = collections.defaultdict(lambda: [0, 0, 0, 0])
        for site in sites:
            label = " ".join(str(site[key]) for key in keys)
            group = sums[(label, site["kind"], site["bits"], site["reason"])]
            for i, key in enumerate(("saves", "saved_bytes", "unique_bytes", "held_bytes")):
                group[i] += site[key]
        say(f"\n  {' '.join(keys):52}" + heading)
        for key, group in sorted(sums.items(), key=lambda item: -item[1][3])[:count]:
            label, kind, bits, reason = key
            columns = "".join(f"{size / mib:10,.1f}" for size in group[1:])
            say(f"  {label[-51:]:52}{group[0]:7}{columns}  {kind} {bits} {reason}")
    say("")


def say_profile(workload: Workload, fold) -> None:
    """Kernels by what they take beyond plain's."""
    plain = {name: row for name, *row in measure.kernels(workload, contextlib.nullcontext)}
    folded = {name: row for name, *row in measure.kernels(workload, lambda: fold)}
    own = {name: row for name, row in folded.items() if "backfold" in name}
    total = [sum(row[1] for row in part.values()) for part in (folded, own, plain)]
    say("\n  kernels {:.1f} ms, backfold's {:.1f} of these; plain {:.1f} ms".format(*total))
    more = {name: row[1] - plain.get(name, (0, 0.0))[1] for name, row in folded.items()}
    for name in sorted(more, key=more.__getitem__, reverse=True)[:PROFILE_ROWS]:
        calls, milliseconds = folded[name]
        before = plain.get(name, (0, 0.0))[0]
        short = NAMESPACES.sub("", name)[:90]
        say(f"  {more[name]:+8.2f} of {milliseconds:6.2f} ms, {calls:4} calls ({before})  {short}")
    say("")
