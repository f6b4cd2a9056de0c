# SPDX-License-Identifier: Apache-2.0
"""The page of a report, in a real browser. Screenshots are kept in build/artefacts."""

import doctest
import json
import pathlib
import sys

import backfold
import browser
import pytest
import torch
import transformers
from backfold._page import _families, _format, _tree, render
from small_network import batch, network

ARTEFACTS = pathlib.Path(__file__).parents[2] / "build" / "artefacts"
TAB, ENTER = ("Tab", 9), ("Enter", 13, "\r")
SIZES = {
    "light": {"width": 1200, "height": 900},
    "dark": {"width": 1200, "height": 900, "dark": True},
    "phone": {"width": 390, "height": 844, "phone": True},
}


@pytest.fixture(scope="module")
def report() -> backfold.Report:
    """Of a small GPT-2 at the default settings, after its first plan."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    fold = backfold.Controller(model)
    for _ in range(4):
        tokens = torch.randint(64, (8, 64))
        with fold:
            loss = model(tokens, labels=tokens).loss
        loss.backward()
    return fold.report()


@pytest.fixture(scope="module")
def page(report, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.html(path)
    return path


@pytest.fixture(scope="module")
def chromium():
    if browser.find() is None:
        pytest.fail(browser.MISSING, pytrace=False)
    with browser.Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def opened(chromium, page) -> browser.Browser:
    """The page on a desk, for tests that only look at it. Loading it takes seconds."""
    chromium.open(page, **SIZES["light"])
    return chromium


def numbers(chromium: browser.Browser, table: str) -> list[list[float | None]]:
    """The exact numbers behind each row of a table's body."""
    cells = chromium.evaluate(
        f"[...document.querySelectorAll('#{table} tbody tr')].map("
        "row => [...row.querySelectorAll('[data-value]')].map(cell => cell.dataset.value))"
    )
    return [[None if cell == "None" else float(cell) for cell in row] for row in cells]


@pytest.mark.parametrize("size", SIZES)
def test_opens_without_complaints_and_without_the_network(chromium, page, size):
    chromium.open(page, **SIZES[size])
    chromium.screenshot(ARTEFACTS / f"report-{size}.png")
    assert chromium.complaints == []
    assert chromium.requests == []
    drawn = chromium.evaluate("[...document.querySelectorAll('.chart .main-svg')].length")
    assert drawn >= 4
    # Nothing is wider than the screen; wide tables scroll by themselves.
    width = chromium.evaluate("document.documentElement.scrollWidth")
    assert width <= SIZES[size]["width"]
    shades = chromium.evaluate(
        "[document.body, document.querySelector('section')].map(one => "
        "Number(getComputedStyle(one).backgroundColor.match(/\\d+/)[0]))"
    )
    assert max(shades) < 60 if size == "dark" else min(shades) > 200


def test_tables_have_the_numbers_of_the_report(opened, report):
    told = report.to_dict()
    fields = ("saves", "saved_bytes", "unique_bytes", "held_bytes", "offloaded_bytes", "bits")
    assert numbers(opened, "sites") == [[site[name] for name in fields] for site in told["sites"]]
    timeline = told["timeline"]
    curves = ("plain_bytes", "held_bytes", "made_bytes")
    assert numbers(opened, "events") == [
        list(row) for row in zip(*(timeline[name] for name in curves), strict=True)
    ]
    assert numbers(opened, "peaks") == [[peak["bytes"]] for peak in timeline["peak"].values()]
    plans = [
        [plan[name] for name in ("step", "mean_bits", "held_bytes", "error", "uniform_error",
                                 "gradient_energy")]
        for plan in told["history"]["plans"]
    ]  # fmt: skip
    assert plans and numbers(opened, "plans") == plans
    measured = [site for site in told["sites"] if site["sensitivity"] and site["elements"]]
    shown = numbers(opened, "measured")
    assert len(shown) == len(measured) > 5
    assert sum(row[2] for row in shown) == pytest.approx(sum(s["sensitivity"] for s in measured))
    derived = [site for site in told["sites"] if site["recipe"]]
    spared = [row[-1] for row in numbers(opened, "derived-places")]
    assert sum(spared) == sum(site["spared_bytes"] for site in derived) == told["spared_bytes"]


def test_the_tree_and_its_chart_add_up_to_the_report(opened, report):
    told = report.to_dict()
    for phase, total in (("before", "unique_bytes"), ("after", "held_bytes")):
        root = f"document.querySelector('.tree [data-{phase}]').dataset.{phase}"
        leaves = (
            f"[...document.querySelectorAll('.tree .leaf [data-{phase}]')]"
            f".reduce((sum, leaf) => sum + Number(leaf.dataset.{phase}), 0)"
        )
        assert int(opened.evaluate(root)) == opened.evaluate(leaves) == told[total]
        opened.evaluate(f"document.querySelector('[data-show={phase}]').click()")
        whole = "document.getElementById('tree-chart').data[0].values[0]"
        assert opened.evaluate(whole) == told[total]


def test_curves_are_those_of_the_timeline(opened, report):
    timeline = report.to_dict()["timeline"]
    drawn = opened.evaluate(
        "document.getElementById('timeline-chart').data.map(one => Array.from(one.y))"
    )
    scale = max(timeline["plain_bytes"]) / max(drawn[0])
    assert [round(y * scale) for y in drawn[0]] == timeline["plain_bytes"]
    assert [round(y * scale) for y in drawn[2]] == timeline["held_bytes"]
    notes = opened.evaluate(
        "document.getElementById('timeline-chart').layout.annotations.map(one => one.text)"
    )
    assert sum("peak" in note for note in notes) == 2


def test_everything_can_be_reached_by_keyboard(opened):
    focused = []
    for _ in range(60):
        opened.press(*TAB)
        focused.append(
            opened.evaluate(
                "document.activeElement.dataset.show || document.activeElement.className || "
                "document.activeElement.tagName"
            )
        )
        if focused[-1] == "after":
            opened.press(*ENTER)
    assert focused[0] == "skip"
    assert {"before", "after", "A", "SUMMARY", "scroll"} <= set(focused)
    pressed = "document.querySelector('[data-show=after]').getAttribute('aria-pressed')"
    assert opened.evaluate(pressed) == "true"


def test_names_cannot_become_markup(chromium, report, tmp_path):
    told = report.to_dict()
    bad = "<img src=x onerror=alert(1)></script>"
    for site in told["sites"]:
        site["module"] = bad
    path = tmp_path / "bad.html"
    path.write_text(render(told), encoding="utf-8")
    chromium.open(path, **SIZES["light"])
    assert chromium.complaints == []
    assert chromium.evaluate("document.querySelectorAll('img').length") == 0
    assert bad in chromium.evaluate("document.querySelector('.tree').textContent")


def test_reports_with_little_in_them_have_a_page(chromium, tmp_path):
    model, x = network(), batch()
    few = backfold.Controller(model, bits=None, min_bytes=0)
    with few:
        model(x * 2).sum()
    reports = {
        "empty": backfold.Controller(bits=4).report(),
        "inspected": backfold.inspect(lambda: model(x * 2).sum(), model),
        "exact": few.report(),
    }
    for name, told in reports.items():
        told.html(tmp_path / f"{name}.html")
        chromium.open(tmp_path / f"{name}.html", **SIZES["light"])
        assert chromium.complaints == [], name


def test_a_report_of_another_format_is_refused(report):
    told = report.to_dict()
    with pytest.raises(ValueError, match="format 1, got 2: another version of Backfold wrote it"):
        render({**told, "format": 2})
    with pytest.raises(ValueError, match="format 1, got None"):
        render({})
    with pytest.raises(TypeError, match=r"dict of Report.to_dict\(\), got str"):
        render(json.dumps(told))


def test_docstrings():
    for module in (_families, _format, _tree):
        results = doctest.testmod(module)
        assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("library, module", [("plotly", "plotly.offline"), ("jinja2", "jinja2")])
def test_a_missing_library_names_the_extra(report, tmp_path, monkeypatch, library, module):
    backfold._page._library.compressed_charts.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {library},.*pip install 'backfold\[page\]'"):
        report.html(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("named", [None, "no-such-browser"])
def test_without_a_browser_it_is_said_what_to_install(monkeypatch, named):
    if named is None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("BACKFOLD_BROWSER", raising=False)
    else:  # the one that was asked for, not another that is there
        monkeypatch.setenv("BACKFOLD_BROWSER", named)
    assert browser.find() is None
    with pytest.raises(FileNotFoundError) as raised:
        browser.Browser()
    for way in ("`scripts/setup browser`", "`apt-get install chromium`", "BACKFOLD_BROWSER"):
        assert way in str(raised.value)
