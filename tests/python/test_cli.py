# SPDX-License-Identifier: Apache-2.0
"""The command line: doctor, bench and report."""

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import types

import backfold
import backfold_command
import pytest
import torch
from backfold import _C, codecs
from backfold._page._library import compressed_charts
from backfold.cli import _doctor, _self_test, main
from click.testing import CliRunner
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


def invoke(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def test_every_command_has_help_with_examples():
    assert "backfold doctor" in invoke("--help").output
    for name in main.commands:
        result = invoke(name, "--help")
        assert result.exit_code == 0
        assert "Examples:" in result.output and f"backfold {name}" in result.output


def test_the_command_is_installed():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="backfold")
    assert script.load() is backfold_command.main


def test_the_command_says_why_the_package_cannot_be_imported(monkeypatch, capsys):
    def refuse(name):
        raise ImportError("Backfold works with torch 2.11 to 2.15, found 2.9.1.")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(SystemExit) as end:
        backfold_command.main()
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "backfold: Backfold works with torch 2.11 to 2.15, found 2.9.1." in said
    assert f"torch {importlib.metadata.version('torch')}" in said


# doctor


def test_doctor_finds_nothing_wrong_and_tests_every_codec_on_every_backend():
    result = invoke("doctor", "--json")
    found = json.loads(result.output)
    assert result.exit_code == 0, found["problems"]
    assert found["ok"] and found["versions"]["torch"] == torch.__version__
    backends = _C.simd_targets()
    if _C.built_with_cuda():
        backends += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    tested = {(one["codec"].split(",")[0], one["backend"]) for one in found["self_test"]}
    names = {codec.__name__ for codec in codecs.Codec.__subclasses__()}
    assert tested == {(name, backend) for name in names for backend in backends}
    assert all(one["cases"] >= 8 for one in found["self_test"])
    text = invoke("doctor")
    assert text.exit_code == 0 and "all is well" in text.output
    assert all(name in text.output for name in (*names, *backends))


@pytest.mark.parametrize("breaks", ["payload", "result"])
def test_doctor_notices_a_backend_that_computes_something_else(monkeypatch, breaks):
    right = _self_test._round_trip

    def wrong(case, device):
        payload, decoded, ran = right(case, device)
        if ran == _C.simd_targets()[0] and "rotated" in case.name:
            (payload if breaks == "payload" else decoded.view(torch.uint8)).view(-1)[-1] ^= 1
        return payload, decoded, ran

    monkeypatch.setattr(_self_test, "_round_trip", wrong)
    result = invoke("doctor", "--json")
    found = json.loads(result.output)
    assert result.exit_code == 1 and not found["ok"]
    words = "1 of" if breaks == "payload" else "decode differently"
    assert found["problems"] and all(words in problem for problem in found["problems"])
    assert all("Quantize on " in problem and "rotated" in problem for problem in found["problems"])
    assert "problems found" in invoke("doctor").output


def test_doctor_notices_a_gpu_without_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_C, "built_with_cuda", lambda: False)
    monkeypatch.setattr(_doctor, "devices", list)
    result = invoke("doctor", "--json")
    (problem,) = json.loads(result.output)["problems"]
    assert result.exit_code == 1 and "torch sees 1 GPU, but this build has no CUDA" in problem


def test_a_target_that_is_not_there_fails_the_doctor():
    result = subprocess.run(
        [sys.executable, "-m", "backfold", "doctor", "--json"],
        env={**os.environ, "BACKFOLD_TARGET": "AVX9", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert any("BACKFOLD_TARGET 'AVX9' is neither" in problem for problem in found["problems"])
    assert found["backends"]["chosen_on_the_cpu"] is None


def test_a_host_target_is_chosen_and_left_again():
    tensor = torch.randn(1000)
    try:
        for name in ("reference", *_C.simd_targets()):
            _C.use_host_target(name)
            assert _C.host_target_that_ran() == ""
            backfold.pack(tensor)
            assert _C.host_target_that_ran() == name
        with pytest.raises(ValueError, match=r"target must be one of reference, .*got 'AVX9'"):
            _C.use_host_target("AVX9")
    finally:
        _C.use_host_target("")
    backfold.pack(tensor)
    assert _C.host_target_that_ran() == ""  # only counted while one is chosen


# bench


def test_bench_measures_codecs_and_a_training():
    before = torch.get_rng_state()
    found = json.loads(invoke("bench", "--quick", "--device", "cpu", "--json").output)
    assert torch.equal(torch.get_rng_state(), before)
    for speed in found["codecs"]:
        assert speed["ratio"] > 3
        assert min(speed[f"{what}_seconds"] for what in ("copy", "pack", "unpack")) > 0
    plain, exact, lossy = found["training"]
    assert plain["held_bytes"] > 1.5 * exact["held_bytes"] > 6 * lossy["held_bytes"]
    assert plain["peak_bytes"] > exact["peak_bytes"] > lossy["peak_bytes"]
    assert exact["loss"] == plain["loss"]
    assert lossy["loss"] == pytest.approx(plain["loss"], rel=0.05)


@pytest.mark.parametrize("device", ["abacus", "meta", "cuda"])
def test_bench_refuses_devices_it_cannot_use(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("bench", "--device", device)
    assert result.exit_code == 2 and "--device" in result.output and device in result.output


# report


@pytest.fixture
def report() -> backfold.Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU())
    fold = backfold.Controller(model, bits=4, min_bytes=0)
    for _ in range(4):
        with fold:
            loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
    assert fold.report().to_dict()["plan"] is not None
    return fold.report()


@pytest.fixture
def file(report, tmp_path) -> str:
    path = tmp_path / "run.json"
    path.write_text(report.to_json())
    return str(path)


def test_a_saved_report_says_what_the_run_said(report, file):
    read = backfold.Report.from_json(report.to_json())
    assert read.text(0) == report.text(0)
    for name in ("step", "folded", "alive_bytes", "offloaded_bytes", "noise", "plan"):
        assert read.to_dict()[name] == report.to_dict()[name]
    for site, wanted in zip(read.to_dict()["sites"], report.to_dict()["sites"], strict=True):
        assert site["error"] == wanted["error"] and site["layout"] == wanted["layout"]
    result = invoke("report", file)
    assert (result.exit_code, result.output) == (0, report.text() + "\n")
    assert invoke("report", file, "--rows", "2").output == report.text(2) + "\n"
    assert json.loads(invoke("report", file, "--json").output) == report.to_dict()


def test_a_report_that_only_observed_stays_one():
    x = torch.randn(64, 64, requires_grad=True)
    report = backfold.inspect(lambda: x.exp().sum())
    read = backfold.Report.from_json(report.to_json())
    assert "kept by autograd alone" in str(read) and str(read) == str(report)


def test_numbers_that_are_not_finite_come_back_as_nan(report):
    values = {**report.to_dict(), "noise": 0.5}
    values["sites"][0]["error"] = None
    read = backfold.Report.from_json(json.dumps(values)).to_dict()
    assert read["sites"][0]["error"] is None and read["noise"] == 0.5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no JSON", "report must be valid JSON"),
        ("[1, 2]", "report must be a JSON object"),
        ("{}", "must have been written by Backfold, but has no 'format'"),
        ('{"format": "1"}', 'format must be an integer, got "1"'),
        (
            '{"format": 99}',
            "this version of Backfold reads, got format 99",
        ),
        ('{"format": 1}', "has no 'step'"),
    ],
)
def test_other_files_are_refused(tmp_path, text, why):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="report"):
        backfold.Report.from_json(text)
    result = invoke("report", str(path))
    assert result.exit_code == 2
    assert str(path) in result.output and why in result.output


def test_broken_fields_are_named(report):
    values = report.to_dict()
    for name, value, why in (
        ("sites", {}, "sites must be a list"),
        ("sites", [1], "has no 'module'"),
        ("held_bytes", "many", "held_bytes must be an integer"),
        ("plan", 4, "has no 'step'"),
    ):
        with pytest.raises(ValueError, match=why):
            backfold.Report.from_json(json.dumps({**values, name: value}))


def test_files_that_cannot_be_read_or_written_are_named(file, tmp_path, monkeypatch):
    assert invoke("report", str(tmp_path / "none.json")).exit_code == 2
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    result = invoke("report", str(tmp_path / "bytes.json"))
    assert result.exit_code == 2 and "cannot be read as text" in result.output
    monkeypatch.setitem(
        sys.modules, "backfold._page", types.SimpleNamespace(render=lambda report: "")
    )
    result = invoke("report", file, "--html", str(tmp_path / "no" / "folder.html"))
    assert result.exit_code == 2 and "cannot be written" in result.output
    assert invoke("report", file, "--html", "x.html", "--json").exit_code == 2


def test_a_page_is_made_of_what_the_file_holds(file, report, tmp_path, monkeypatch):
    # With what only a newer Backfold of the same version knows.
    values = {**report.to_dict(), "more": 1}
    with open(file, "w") as out:
        json.dump(values, out)
    given = []

    def render(values: dict) -> str:
        given.append(values)
        return "<!doctype html><html></html>"

    monkeypatch.setitem(sys.modules, "backfold._page", types.SimpleNamespace(render=render))
    page = tmp_path / "out.html"
    result = invoke("report", file, "--html", str(page))
    assert result.exit_code == 0 and str(page) in result.output
    assert given == [values] and page.read_text() == "<!doctype html><html></html>"


@pytest.mark.parametrize(
    "library, module",
    [("plotly", "plotly.offline"), ("jinja2", "jinja2")],
    ids=["plotly", "jinja2"],
)
def test_a_page_without_its_libraries_names_the_extra(file, tmp_path, monkeypatch, library, module):
    compressed_charts.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    page = tmp_path / "out.html"
    result = invoke("report", file, "--html", str(page))
    assert result.exit_code == 1 and not page.exists()
    said = f"a report's page needs {library}, which is not installed: pip install 'backfold[page]'"
    assert result.output == f"Error: {said}\n"
    assert invoke("report", file).exit_code == 0  # as text, which needs neither


def test_a_page_is_a_complete_document(file, tmp_path):
    page = tmp_path / "out.html"
    assert invoke("report", file, "--html", str(page)).exit_code == 0
    text = page.read_text().strip().lower()
    assert text.startswith("<!doctype html>") and text.endswith("</html>")
