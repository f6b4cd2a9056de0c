#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Doxygen's input filter: prints a header of include/backfold with comments that Doxygen reads.

The headers have plain comments. The first one describes the file, one above a declaration describes
that, and one behind a declaration, with the lines that continue it, what it stands behind. What a
comment indents is a formula, a table or code, and is shown as it is. What is private, or for the
layers above, is left out.
"""

import pathlib
import re
import sys

BLOCK = re.compile(r"(?P<indent>\s*)//(?P<text>.*)")
TRAILING = re.compile(r"(?P<code>.*[,;{])\s*// (?P<text>.*)")


def shown(text: str) -> str:
    """The text of a comment's line. Indented text becomes a block of code for Doxygen."""
    return f"     {text[3:]}" if text.startswith("   ") else text.replace("<", "\\<")


def converted(lines: list[str]) -> list[str]:
    first_code = next(number for number, line in enumerate(lines) if not line.startswith("//"))
    result = ["/// @file", *(f"///{shown(line[2:])}" for line in lines[2:first_code])]
    column = -1  # of a comment behind a declaration
    resume = ""  # the line at which something left out ends
    for line in lines[first_code:]:
        if resume:
            if line != resume.rstrip("\n"):
                continue
            resume = ""
        if line.strip() == "private:":
            resume = line[1:].replace("private:", "};")
            continue
        if line.strip() == "// For the layers above.":
            resume = "\n"
            continue
        block, trailing = BLOCK.fullmatch(line), TRAILING.fullmatch(line)
        if block and len(block["indent"]) == column:
            result.append(f"{block['indent']}///<{shown(block['text'])}")
            continue
        column = -1
        if block:
            result.append(f"{block['indent']}///{shown(block['text'])}")
        elif trailing:
            column = line.index("//", len(trailing["code"]))
            result.append(f"{trailing['code']}  ///< {shown(trailing['text'])}")
        else:
            result.append(line)
    return result


if __name__ == "__main__":
    print("\n".join(converted(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())))
