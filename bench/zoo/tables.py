# SPDX-License-Identifier: Apache-2.0
"""The zoo's figures as text and as Markdown, and checked against their limits."""

import statistics

from isolation import FAILED, MEASURED, NOT_BUILT, Row

WORST_LIMIT = 1.0  # of any architecture in any step
MEDIAN_LIMIT = 0.08  # of the worst steps


def sorted_rows(rows: list[Row]) -> list[Row]:
    """The rows that were measured, worst first."""
    return sorted((row for row in rows if row.status == MEASURED), key=lambda row: -row.worst)


def figure(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1e}"


def mark(row: Row) -> str:
    if not row.repeats:
        return "plain differs from itself"
    return "" if row.bitwise else "bits=None differs"


def cells(row: Row) -> list[str]:
    return [row.library, row.name, *map(figure, row.errors), mark(row)]


def header(steps: int) -> list[str]:
    return ["library", "architecture", *(f"step {i + 1}" for i in range(steps)), ""]


def summary_rows(rows: list[Row]) -> list[list[str]]:
    lines = []
    libraries = list(dict.fromkeys(row.library for row in rows))
    for library in [*libraries, "all"] if len(libraries) > 1 else libraries:
        mine = [row for row in rows if library in (row.library, "all")]
        good = sorted_rows(mine)
        repeatable = [row for row in good if row.repeats]
        after = [max(row.errors[2:]) for row in good if len(row.errors) > 2]
        lines.append(
            [
                library,
                str(len(good)),
                str(sum(row.bitwise for row in repeatable)),
                str(sum(row.worst > WORST_LIMIT for row in good)),
                figure(statistics.median(row.worst for row in good)) if good else "",
                figure(statistics.median(after)) if after else "",
                figure(good[0].worst) if good else "",
                str(sum(row.status == FAILED for row in mine)),
                str(len(mine) - len(good) - sum(row.status == FAILED for row in mine)),
            ]
        )
    return lines


SUMMARY = [
    "library",
    "measured",
    "bitwise under bits=None",
    f"above {WORST_LIMIT:g}",
    "median of the worst",
    "median after the plan",
    "worst",
    "failed",
    "not built",
]


def plain_table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in [head, *rows]:
        first = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        others = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(first + others).rstrip())
    return "\n".join(lines)


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def report(rows: list[Row], steps: int, shown: int | None, markdown: bool) -> str:
    table = markdown_table if markdown else plain_table
    listed = [cells(row) for row in sorted_rows(rows)[:shown]]
    parts = [table(header(steps), listed), table(SUMMARY, summary_rows(rows))]
    lost = [row for row in rows if row.status not in (MEASURED, NOT_BUILT)]
    if lost and not markdown:
        parts.append("\n".join(f"{r.library}/{r.name} {r.status}: {r.reason}" for r in lost))
    return "\n\n".join(parts)


def shortcomings(rows: list[Row]) -> list[str]:
    """Failures and missed limits."""
    good = sorted_rows(rows)
    found = [f"{r.library}/{r.name}: {r.reason}" for r in rows if r.status == FAILED]
    found += [f"{r.library}/{r.name}: {mark(r)}" for r in good if r.repeats and not r.bitwise]
    above = sum(row.worst > WORST_LIMIT for row in good)
    if above:
        found.append(f"{above} architectures have an error above {WORST_LIMIT:g}")
    median = statistics.median([row.worst for row in good] or [0.0])
    if median > MEDIAN_LIMIT:
        found.append(f"the median of the worst is {figure(median)}, above {MEDIAN_LIMIT:g}")
    return found
