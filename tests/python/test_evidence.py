# SPDX-License-Identifier: Apache-2.0
"""The smallest versions of the runs behind the figures of documents, and the check of these.

test_workloads.py has whole training steps of the other models.
"""

import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import types
import zipfile

import numpy
import pytest

pytest.importorskip("tqdm")
Image = pytest.importorskip("PIL.Image")

ROOT = pathlib.Path(__file__).parents[2]
COST = {"step_ms": 1.0, "held_mib": 8.0, "peak_mib": 16.0}


def run(script: str, *options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / script), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> pathlib.Path:
    """A small graph in Cora's format, noise in that of CIFAR-10's images, and a text."""
    folder = tmp_path_factory.mktemp("data")
    draw = numpy.random.default_rng(3)
    nodes, features = 60, 40
    numpy.savez(
        folder / "cora.npz",
        num_nodes=nodes,
        num_features=features,
        feature_row=draw.integers(nodes, size=300),
        feature_col=draw.integers(features, size=300),
        feature_value=numpy.ones(300, numpy.float32),
        edge_index=draw.integers(nodes, size=(2, 200)),
        label=draw.integers(7, size=nodes),
        train_idx=numpy.arange(0, nodes, 2),
        test_idx=numpy.arange(1, nodes, 2),
    )
    with zipfile.ZipFile(folder / "cifar10-half.zip", "w") as archive:
        for split, count in (("train", 260), ("test", 20)):
            for image in range(count):
                pixels = draw.integers(256, size=(32, 32, 3), dtype=numpy.uint8)
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "JPEG")
                archive.writestr(f"{split}/class{image % 10}/{image}.jpg", file.getvalue())
    letters = random.Random(3).choices("to be or not", k=4000)
    (folder / "tinyshakespeare.txt").write_text("".join(letters))
    return folder


def evidence(data: pathlib.Path, out: pathlib.Path, *options: object):
    return run("bench/accuracy/evidence.py", "--data", data, "--out", out, "--tiny", *options)


# Those that need no pretrained model.
TASKS = ["cora-gcn", "cora-gat", "cora-gcnii", "cifar-resnet", "text-gpt"]


def test_trainings_are_kept_and_not_repeated(data, tmp_path):
    variants = ["plain", "exact", "adaptive-4"]
    done = evidence(data, tmp_path, "--tasks", *TASKS, "--variants", *variants)
    assert done.returncode == 0, done.stderr
    for name in TASKS:
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert content["failed"] == []
        found = {run["variant"]: run for run in content["runs"]}
        plain, exact, folded = (found[variant] for variant in variants)
        assert plain["seed"] == 0 and len(found) == len(content["runs"])
        assert (exact["score"], exact["loss"]) == (plain["score"], plain["loss"])
        assert 0 < folded["kept"] < exact["kept"] < plain["kept"] == 1.0, name
        assert folded["loss"] == pytest.approx(plain["loss"], rel=0.1), name

    path = tmp_path / "cora-gcn.json"
    first = json.loads(path.read_text())["runs"]
    done = evidence(data, tmp_path, "--tasks", "cora-gcn", "--variants", "plain", "adaptive-2")
    assert done.returncode == 0, done.stderr
    runs = json.loads(path.read_text())["runs"]
    assert runs[: len(first)] == first  # seconds included: not run again
    assert [one["variant"] for one in runs[len(first) :]] == ["adaptive-2"]
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "trainings.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "no trainings.png: No module named 'matplotlib'" in done.stderr


def test_missing_data_are_named(tmp_path):
    done = evidence(tmp_path, tmp_path, "--tasks", "cora-gat")
    assert done.returncode == 1
    assert f"cora.npz not found in '{tmp_path}'" in done.stderr


def test_steps_have_every_mode_and_keep_gradients(tmp_path):
    path = tmp_path / "steps.json"
    modes = ["exact", "fold2", "checkpoint", "selective", "save_on_cpu"]
    options = ["diffusion", "--tiny", "--steps", 1, "--modes", *modes, "--json", path]
    done = run("bench/workloads/h200.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    (workload,) = json.loads(path.read_text())["workloads"]
    assert (workload["name"], workload["failed"]) == ("diffusion", [])
    assert list(workload["modes"]) == ["plain", *modes]
    assert all(cost["step_ms"] > 0 for cost in workload["modes"].values())
    assert workload["modes"]["fold2"]["held_mib"] < workload["modes"]["exact"]["held_mib"]
    errors = {mode: found["gradient_error"] for mode, found in workload["faith"].items()}
    assert errors["exact"] == 0 < errors["fold2"]


def loaded(path: pathlib.Path) -> types.ModuleType:
    """A program as a module."""
    loader = importlib.machinery.SourceFileLoader(f"{path.stem}_program", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def rows_of(printed: str) -> dict[str, list[str]]:
    """Lines of a table by their title, which two spaces end."""
    lines = (line.strip().split("  ", 1) for line in printed.splitlines())
    return {title: rest.split() for title, rest in (line for line in lines if len(line) == 2)}


def test_the_host_is_measured(tmp_path):
    path = tmp_path / "host.json"
    done = run("bench/host_cost.py", "--tiny", "--device", "cpu", "--json", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["cpu"]
    assert found["saved"]["packed"]["forward"] > found["saved"]["plain"]["forward"] > 0
    assert {"an operation that saves nothing", "an operation under no_grad"} < set(found["saved"])
    for scopes in found["watched"].values():
        assert all(pair["forward"] > 0 for pair in scopes.values())
    model = found["models"]["GPT-2, 1 layers"]
    assert model.pop("operators") > 20
    assert list(model) == ["plain", "passed", "bits=None", "default", "all packed"]


CALLGRIND_H = """
#include <stdio.h>
#include <stdlib.h>
static inline void dump_stats(void) {
  static int dumps = 0;
  char path[4096];
  snprintf(path, sizeof path, "%s.%d", getenv("CALLGRIND_OUT"), ++dumps);
  FILE* file = fopen(path, "w");
  fprintf(file, "totals: %d000000\\n", dumps);
  fclose(file);
}
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_TOGGLE_COLLECT
#define CALLGRIND_ZERO_STATS
#define CALLGRIND_DUMP_STATS_AT(name) dump_stats()
"""
VALGRIND = """#!/bin/sh
for argument; do
  case "$argument" in
    --callgrind-out-file=*) export CALLGRIND_OUT="${argument#*=}"; shift ;;
    --*) shift ;;
    *) break ;;
  esac
done
exec "$@"
"""


def test_instructions_are_those_of_the_last_step(tmp_path, monkeypatch):
    # A valgrind that counts its dumps: two of each of three steps.
    (tmp_path / "valgrind").mkdir()
    (tmp_path / "valgrind" / "callgrind.h").write_text(CALLGRIND_H)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valgrind").write_text(VALGRIND)
    (tmp_path / "bin" / "valgrind").chmod(0o755)
    monkeypatch.setenv("CPATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    modes = ["stored", "watched"]
    done = run("bench/host_instructions.py", "--tiny", "--modes", *modes)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert [rows[mode] for mode in modes] == [["5.00", "6.00"]] * 2


def test_a_cap_of_memory_is_filled(tmp_path):
    path = tmp_path / "cap.json"
    done = run("bench/workloads/cap.py", "bert", "--tiny", "--modes", "fold", "--json", path)
    assert done.returncode == 0, done.stderr
    table = json.loads(path.read_text())["tables"]["bert"]
    plain, fold = (dict(zip(table["head"], row, strict=True)) for row in table["rows"])
    assert (plain[""], fold[""]) == ("plain", "fold")
    for row in (plain, fold):
        assert int(row["batch"]) >= 2
        assert 0 < float(row["peak / cap"]) < 1


def test_probes_are_timed(tmp_path):
    path = tmp_path / "probes.json"
    done = run("bench/workloads/probes.py", "gpt2", "--tiny", "--json", path)
    assert done.returncode == 0, done.stderr
    ((name, *cells),) = json.loads(path.read_text())["tables"]["probes"]["rows"]
    assert name == "gpt2"
    assert float(cells[0]) > 0  # in plain steps, the first one
    assert "with the plan: step" in done.stdout


def test_planning_of_several_processes_is_timed():
    done = run("bench/workloads/ddp.py", "--tiny", "--steps", 4)
    assert done.returncode == 0, done.stderr
    (places,) = re.findall(r"(\d+) places planned", done.stdout)
    assert int(places) > 4
    assert all(float(share) > 0 for share in re.findall(r"([\d.]+)%(?: of|\n)", done.stdout))


def test_steps_that_offload_to_a_file_are_timed():
    done = run("bench/offload.py", "--tiny")
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    kept = {name: float(rows[name][3]) for name in rows if name.startswith(("exact", "4 bits"))}
    assert len(kept) == 6
    assert all((in_file > 0) == ("offload" in name) for name, in_file in kept.items())


# ---- The check of documents --------------------------------------------------------------------


@pytest.fixture
def check(tmp_path) -> types.ModuleType:
    """scripts/evidence, with a folder of results of its own."""
    module = loaded(ROOT / "scripts" / "evidence")
    module.FOLDER = tmp_path
    workloads = [
        {"name": name, "modes": {"plain": COST, "fold": fold}, "failed": ["exact"]}
        for name, fold in (
            ("bert", {"step_ms": 1.1, "held_mib": 2.0, "peak_mib": 4.0}),
            ("gcn", {"step_ms": 1.25, "held_mib": 1.0, "peak_mib": 12.0}),
        )
    ]
    (tmp_path / "steps.json").write_text(json.dumps({"workloads": workloads}))
    runs = [
        {"variant": name, "seed": seed, "score": score, "loss": 0.5, "kept": kept}
        for seed, plain in enumerate((80.0, 82.0))
        for name, score, kept in (("plain", plain, 1.0), ("fixed-2", plain - 1.25, 0.1))
    ]
    (tmp_path / "trained.json").write_text(json.dumps({"runs": runs}))
    batches = {"head": ["", "batch", "/ plain"], "rows": [["plain", "8", "1.00"]]}
    of_run = {"command": "bench/run cap", "device": "a GPU", "torch": "2"}
    (tmp_path / "cap.json").write_text(json.dumps({**of_run, "tables": {"bert": batches}}))
    return module


@pytest.mark.parametrize(
    "asked, written",
    [
        ("steps bert fold.step", "1.10"),
        ("steps * fold.step percent", "10 to 25"),
        ("steps * fold.held/plain less", "75 to 88"),
        ("steps bert plain.peak/fold short", "4.0"),
        ("steps bert exact.step", "not measured yet"),
        ("trained fixed-2 difference", "-1.25"),
        ("trained fixed-2 kept", "0.100"),
        ("trained adaptive-2 difference", "not measured yet"),
        ("nothing bert fold.step", "not measured yet"),
        ("cap bert/plain /_plain", "1.00"),
        ("cap bert/all_packed batch", "not measured yet"),
        ("cap gcn/plain batch", "not measured yet"),
    ],
)
def test_a_figure_in_a_sentence_comes_from_its_file(check, asked, written):
    begin, end = f"takes <!--= {asked} -->", "<!--=--> here"
    assert check.fresh_text(f"{begin}7.77{end}") == f"{begin}{written}{end}"


def test_tables_say_what_failed_and_what_is_missing(check):
    text = "<!-- evidence: {} -->\nold\n<!-- end of evidence -->"
    table = check.fresh_text(text.format("steps fold.step exact.peak stored.peak"))
    assert "| 1.10 | failed | - |" in table
    table = check.fresh_text(text.format("trained"))
    assert "| fixed-2 | 2 | 79.75 +- 1.41 | -1.25 | 0.5000 | 0.100 |" in table
    assert "Not measured yet." in check.fresh_text(text.format("nothing fold.step"))


def test_a_table_stands_as_it_was_printed(check):
    table = check.fresh_text("<!-- evidence: cap bert -->\n<!-- end of evidence -->")
    assert "|  | batch | / plain |\n|---|---|---|\n| plain | 8 | 1.00 |\n" in table
    assert "(`bench/run cap`; a GPU, torch 2)" in table


def test_a_table_is_kept_as_it_was_printed(tmp_path):
    path = tmp_path / "frontier.json"
    options = ["gpt2", "--tiny", "--budgets", 1, "--steps", 1, "--json", path]
    done = run("bench/workloads/frontier.py", *options)
    assert done.returncode == 0, done.stderr
    kept = json.loads(path.read_text())
    assert kept["command"].startswith("bench/run frontier gpt2 --tiny")
    (table,) = kept["tables"].values()
    assert len({len(line) for line in [table["head"], *table["rows"]]}) == 1
    for row in table["rows"]:
        (line,) = (one for one in done.stdout.splitlines() if one.startswith(f"  {row[0]} "))
        assert line.split()[-len(row[1:]) :] == row[1:]


def test_inputs_of_checkpoints_are_measured_folded_and_exact(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "checkpoint.json"
    options = ["bert", "--layers", 2, "--steps", 1, "--repeats", 2, "--json", path]
    done = run("bench/workloads/checkpoint.py", *options)
    assert done.returncode == 0, done.stderr
    table = json.loads(path.read_text())["tables"]["checkpoint"]
    assert [row[0] for row in table["rows"]] == ["BERT, not reentrant", "BERT, reentrant"]
    for row in table["rows"]:
        cells = dict(zip(table["head"], row, strict=True))
        errors = [float(cells[f"all inputs at {bits} bits"].split()[0]) for bits in (4, 6, 8)]
        assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0
        inputs = [
            float(cells[f"{name}: held"].split(", ")[1]) for name in ("exact inputs", "default")
        ]
        assert 0 < inputs[1] < inputs[0] / 2


def test_compiled_steps_are_compared_at_the_same_bytes(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "compiled.json"
    options = ["--backend", "aot_eager", "--model", "gpt2", "--json", path]
    done = run("bench/compiled.py", *options)
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert content["command"].startswith("bench/run compiled --backend aot_eager --model gpt2")
    table = content["tables"]["gpt2"]
    found = {row[0]: dict(zip(table["head"], row, strict=True)) for row in table["rows"]}
    held, error = found["held after forward"], found["error of the gradient / its norm"]
    assert float(held["planned"]) <= float(held["4 bits, one width"]) + 0.1
    assert float(held["4 bits, one width"]) < 0.75 * float(held["plain"])
    assert (error["plain"], error["`bits=None`"]) == ("", "0.0000")
    assert 0 < float(error["planned"]) < float(error["4 bits, one width"]) < 0.3


def test_a_table_of_figures_names_its_command(check):
    table = "## Speed\n\n| a | b |\n|---|---|\n| 1.25 | 3,100 |\n| 1.50 | 2.75 |\n"
    assert check.nameless_tables(table) == [3]
    assert check.nameless_tables(table + "\n(`bench/run cpu`)\n") == []
    assert check.nameless_tables(table.replace("1.25", "one").replace("3,100", "two")) == []


def test_the_picture_shows_what_was_measured(check, tmp_path):
    pytest.importorskip("matplotlib")
    done = run("bench/workloads/plots.py", tmp_path / "steps.json", tmp_path / "steps.png")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_trainings_are_drawn_at_their_means(check, tmp_path, monkeypatch):
    """`trained` has 81 +- 1.41 plain and 1.25 less at a tenth of the bytes."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "workloads"))
    plots = loaded(ROOT / "bench" / "accuracy" / "plots.py")
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append((figure, path)))
    runs = json.loads((tmp_path / "trained.json").read_text())["runs"]
    folded = [run for run in runs if run["variant"] != "plain"]
    (tmp_path / "folded.json").write_text(json.dumps({"runs": folded}))
    paths = [tmp_path / "folded.json", tmp_path / "trained.json"]
    plots.plot(paths, tmp_path / "trainings.png")
    ((figure, path),) = drawn
    assert path == tmp_path / "trainings.png"
    (axis,) = figure.axes  # nothing to compare with in the other file
    assert (axis.get_title(), axis.get_ylabel()) == ("trained", "accuracy, %")
    (container,) = axis.containers
    point, _, (bar,) = container
    assert point.get_xydata().tolist() == [[pytest.approx(0.1), 79.75]]
    (ends,) = bar.get_segments()
    assert ends[:, 1] == pytest.approx([79.75 - 2**0.5, 79.75 + 2**0.5])
    assert [text.get_text() for text in axis.texts] == ["2"]
    with pytest.raises(ValueError, match="no file has a plain run"):
        plots.plot(paths[:1], tmp_path / "trainings.png")
