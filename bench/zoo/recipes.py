#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists what each recipe saves, and the operators whose results are stored most.

    bench/run recipes                             every architecture of the zoo, and the workloads
    bench/run recipes --library workloads         those of bench/run h200, in tiny sizes
    bench/run recipes --only 'vit*' --markdown    some of them, as Markdown

A step of each architecture runs with and without derivation, at 4 bits everywhere and under
bits=None. What a place holds less with it is saved by the recipe of its tensor. Figures are parts
of what is held without derivation (of what autograd saves, for stored results), on average over
all architectures that were measured; `used` counts those that the operator matters to.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import sys
import typing
import warnings

# Prepares the environment of torch, so that these come after it.
import backfold
import isolation
import run
import tables
import torch
from errors import MIN_BYTES, RandomWeights, State, Task, gradient
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from vision_libraries import find_vision_libraries

SETTINGS = {"4 bits": {"bits": 4, "adaptive": False}, "bits=None": {"bits": None}}
WORKLOADS = "workloads"

Parts = dict[str, float]


@dataclasses.dataclass
class Tally:
    """By operator, as parts of the whole."""

    saved: dict[str, Parts]  # by setting: held bytes that its recipe saves
    stored: Parts  # bytes of its results that autograd saves and bits=None does not derive


@dataclasses.dataclass
class Row(isolation.Outcome):
    saved: dict[str, Parts] = dataclasses.field(default_factory=dict)
    stored: Parts = dataclasses.field(default_factory=dict)


def short(op: str) -> str:
    return op.removeprefix("aten::").removesuffix("_")


class Producers(TorchDispatchMode):
    """Knows the operator that made a storage; not those of parameters and of casts of these."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        self._ops = {tensor.untyped_storage()._cdata: "" for tensor in tensors}
        self._tensors: list[torch.Tensor] = []  # alive, so that no address is used again

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
        results = func(*args, **(kwargs or {}))
        casts = func.name() == "aten::_to_copy"
        of_parameter = casts and all(self._ops.get(storage) == "" for storage in given)
        for tensor in tensors_in(results):
            storage = tensor.untyped_storage()._cdata
            if storage not in given or func._schema.is_mutable:
                self._ops[storage] = "" if of_parameter else short(func._schema.name)
            self._tensors.append(tensor)
        return results

    def of(self, tensor: torch.Tensor) -> str:
        return self._ops.get(tensor.untyped_storage()._cdata, "(given)")


def tensors_in(tree: object) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.layout == torch.strided]


def saved_results(task: Task) -> collections.Counter[str]:
    """Bytes that autograd saves, each storage once, by the operator that made it."""
    found: dict[tuple[int, str], int] = {}
    producers = Producers(task.model)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided and (op := producers.of(tensor)):
            storage = tensor.untyped_storage()
            found[storage._cdata, op] = storage.nbytes()
        return tensor

    with producers, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        RandomWeights()(task.outputs())
    total = collections.Counter[str]()
    for (_, op), nbytes in found.items():
        total[op] += nbytes
    return total


def held_by_place(task: Task, **options: typing.Any) -> dict[tuple, dict]:
    fold = backfold.Controller(task.model, min_bytes=MIN_BYTES, **options)
    loss = RandomWeights()
    for _ in range(2):  # places have learned something at the second step
        gradient(task, loss, fold)
    sites = fold.report().to_dict()["sites"]
    return {(s["module"], s["op"], s["slot"], s["occurrence"]): s for s in sites}


def tally(task: Task) -> Tally:
    before = State(task.model)
    made = saved_results(task)
    saved, derived = {}, collections.Counter[str]()
    for name, options in SETTINGS.items():
        before.restore()
        stored = held_by_place(task, derive=False, **options)
        before.restore()
        places = held_by_place(task, **options)
        whole = sum(place["held_bytes"] for place in stored.values())
        derived.clear()
        for key in stored.keys() | places.keys():
            place, other = places.get(key), stored.get(key)
            recipe = place["recipe"].split(", ")[0] if place else ""
            less = (other or {}).get("held_bytes", 0) - (place or {}).get("held_bytes", 0)
            if less:
                derived[short(recipe or key[1])] += less
        saved[name] = {op: nbytes / whole for op, nbytes in derived.items()}
    rest = {op: nbytes - derived[op] for op, nbytes in made.items()}
    return Tally(saved, {op: n / made.total() for op, n in rest.items() if n > 0})


def build_workload(name: str) -> Task:
    from models import BUILDERS

    workload = BUILDERS[name](True)
    return Task(workload.model, workload.loss)


def jobs_of(arguments: argparse.Namespace) -> list[isolation.Job]:
    libraries = arguments.library or [*run.LIBRARIES, WORKLOADS]
    others = [library for library in libraries if library != WORKLOADS]
    jobs = run.all_jobs(others, arguments.only, demanded=bool(arguments.library), row=Row)
    if WORKLOADS in libraries:
        sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "workloads"))
        from models import BUILDERS

        jobs += [isolation.Job(Row(WORKLOADS, name), build_workload) for name in BUILDERS]
    return jobs


def means(parts: list[Parts]) -> dict[str, tuple[float, int]]:
    """By operator, largest first: the mean, and how many it matters to."""
    found: dict[str, tuple[float, int]] = {}
    for op in {op for one in parts for op in one}:
        values = [one.get(op, 0.0) for one in parts]
        found[op] = sum(values) / len(values), sum(value > 1e-3 for value in values)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def report(rows: list[Row], shown: int, markdown: bool) -> str:
    table = tables.markdown_table if markdown else tables.plain_table
    good = [row for row in rows if row.status == isolation.MEASURED]
    if not good:
        return "nothing was measured"
    saves = {name: means([row.saved[name] for row in good]) for name in SETTINGS}
    cells = [
        [op, str(used), *(f"{saves[name].get(op, (0.0, 0))[0]:.4f}" for name in SETTINGS)]
        for op, (_, used) in saves[next(iter(SETTINGS))].items()
    ]
    totals = [f"{sum(part for part, _ in saves[name].values()):.4f}" for name in SETTINGS]
    cells = [["all", str(len(good)), *totals], *cells[:shown]]
    stored = means([row.stored for row in good])
    known = {op for found in saves.values() for op, (part, _) in found.items() if part > 0}
    rest = [
        [op, str(used), f"{part:.4f}", "yes" if op in known else ""]
        for op, (part, used) in stored.items()
    ]
    parts = [
        table(["recipe", "used", *SETTINGS], cells),
        table(["stored results of", "used", "part", "saves elsewhere"], rest[:shown]),
        f"{len(good)} of {len(rows)} architectures were measured",
    ]
    return "\n\n".join(parts)


def measure_all(arguments: argparse.Namespace) -> list[Row]:
    find_vision_libraries()
    jobs, rows = jobs_of(arguments), []
    results = isolation.measured(jobs, tally, arguments.jobs, timeout=120, gibibytes=12)
    with tqdm(total=len(jobs), unit="model", smoothing=0.05) as bar:
        for row in results:
            rows.append(row)
            bar.set_postfix_str(f"{row.name} {row.status}", refresh=False)
            bar.update()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench/run recipes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*run.LIBRARIES, WORKLOADS]
    parser.add_argument("--library", action="append", choices=names, help="may be repeated")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="shell pattern for names")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--json", type=pathlib.Path, metavar="OUT", help="also write all figures")
    parser.add_argument("--from", dest="source", type=pathlib.Path, metavar="IN", help="no run")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    parser.add_argument("--rows", type=int, default=25, help="of each table (default: 25)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.source:
        rows = [Row(**row) for row in json.loads(arguments.source.read_text())]
    else:
        rows = measure_all(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows]) + "\n")
    print(report(rows, arguments.rows, arguments.markdown))


if __name__ == "__main__":
    main()
