# SPDX-License-Identifier: Apache-2.0
"""Tables for a terminal or as Markdown."""


def table(head: list[str], rows: list[list[str]], markdown: bool) -> str:
    """The first column is left-aligned, the others are right-aligned."""
    if markdown:
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for name, *cells in [head, *rows]:
        right = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"{name:{widths[0]}}", *right]))
    return "\n".join(lines)
