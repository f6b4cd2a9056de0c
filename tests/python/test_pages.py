# SPDX-License-Identifier: Apache-2.0
"""The programs in the documentation run, and print what their pages say.

The blocks of Python on a page are one program. A block of text behind one of them is its output.
Words must be the same; numbers may differ by a third, since releases of torch save a little more or
less. On a machine with a GPU, where some programs use it, only words are compared. Three dots stand
for any lines.
"""

import contextlib
import io
import pathlib
import re

import pytest
import torch
from torch import distributed

ROOT = pathlib.Path(__file__).parents[2]
NEEDS = {
    "guides/long-context": ["transformers"],
    "guides/graph": ["torch_geometric"],
    "guides/lora": ["transformers", "accelerate", "peft"],
}
PAGES = ["start", "how", *sorted(f"guides/{page.stem}" for page in ROOT.glob("docs/guides/*.md"))]
BLOCK = re.compile(r"^```(?P<kind>python|text)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")

pytestmark = pytest.mark.usefixtures("one_thread")


def program(page: str) -> list[tuple[str, str | None]]:
    """The blocks of a page, each with the output that the page shows."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks: list[tuple[str, str | None]] = []
    for block in BLOCK.finditer(text):
        if block["kind"] == "python":
            line = text.count("\n", 0, block.start()) + 1
            blocks.append(("\n" * line + block["text"], None))  # tracebacks name the page's lines
        else:
            blocks[-1] = (blocks[-1][0], block["text"])
    return blocks


def agree(shown: str, printed: str, compare_numbers: bool = True) -> bool:
    lines = (".*" if line == "..." else pattern(line) for line in shown.splitlines())
    found = re.fullmatch(r"\s+".join(lines), printed.strip(), re.DOTALL)
    return found is not None and (
        not compare_numbers
        or all(
            value(a) == pytest.approx(value(b), rel=0.35, abs=0.02)
            for a, b in zip(NUMBER.findall(shown), found.groups(), strict=True)
        )
    )


def pattern(line: str) -> str:
    """What a printed line must look like, with a group for each number."""
    words = (NUMBER.sub("#", word) for word in line.split())
    return r"\s+".join(re.escape(word).replace(r"\#", f"({NUMBER.pattern})") for word in words)


def value(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.fixture
def generators():
    """Pages seed torch's generators, which other tests may rely on."""
    with torch.random.fork_rng():
        yield


@pytest.fixture
def launched(monkeypatch):
    """The environment that torchrun gives a single process."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    for name, text in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_a_page_prints_what_the_page_says(page, generators, request):
    for library in NEEDS.get(page, []):
        pytest.importorskip(library)
    if page == "guides/several-gpus":
        request.getfixturevalue("launched")
    names: dict[str, object] = {"__name__": "__main__"}
    for source, shown in program(page):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(source, f"docs/{page}.md", "exec"), names)
        if shown is not None:
            printed = output.getvalue()
            same = agree(shown, printed, not torch.cuda.is_available())
            assert same, f"docs/{page}.md shows\n{shown}\nand prints\n{printed}"


def test_another_word_or_number_is_noticed():
    assert agree("held 1,000 of 8,000 bytes\n", "held 1,100  of 8,000 bytes\n")
    assert not agree("held 1,000 of 8,000 bytes\n", "held 1,600 of 8,000 bytes\n")
    assert not agree("held 0.52 of all\n", "kept 0.52 of all\n")
    assert not agree("held 0.52\n", "held 0.52 1\n")
    assert agree("held 0.52\n...\n", "held 0.52\nand 3 more\nlines\n")
