#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares folded with plain gradients for every architecture that builds on a CPU.

    bench/run zoo                                 all installed libraries, 4 bits, four steps
    bench/run zoo --library timm --only 'b*'      some of them; --only also takes library/name
    bench/run zoo --bits 8 --json zoo.json        another width; all figures to a file
    bench/run zoo --from zoo.json --markdown      the tables from such a file as Markdown
    bench/zoo/causes.py beit vit_msn              which operators' tensors an error comes from

Models are tiny and freshly initialised, with two samples each. In each step the gradient under
bits=None must equal plain's, bit for bit; the error of the folded one is ||folded - plain|| /
||plain|| over all parameters. Sorted, worst first. `scripts/setup zoo` brings timm and torchvision.
"""

import argparse
import dataclasses
import fnmatch
import functools
import importlib
import json
import os
import pathlib
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import backfold
    import isolation
    import tables
    import torch
    from errors import measure
    from tqdm import tqdm
    from vision_libraries import find_vision_libraries
except ImportError as error:
    sys.exit(f"bench/zoo/run.py: {error}. Build the package with make test-python first.")

LIBRARIES = {
    "transformers": "transformers_models",
    "timm": "timm_models",
    "torchvision": "torchvision_models",
    "torch_geometric": "graph_layers",
}


def jobs_of(library: str, pattern: str, row: type[isolation.Outcome]) -> list[isolation.Job]:
    module = importlib.import_module(LIBRARIES[library])
    return [
        isolation.Job(row(library, name), module.build)
        for name in module.names()
        if fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(f"{library}/{name}", pattern)
    ]


def all_jobs(
    libraries: list[str],
    pattern: str,
    demanded: bool,
    row: type[isolation.Outcome] = isolation.Row,
) -> list[isolation.Job]:
    found = []
    for library in libraries:
        try:
            importlib.import_module(library)
            found += jobs_of(library, pattern, row)
        except ImportError as error:
            if demanded:
                sys.exit(f"bench/zoo/run.py: {library} cannot be imported: {error}")
            print(f"bench/zoo/run.py: {library} is skipped: {error}", file=sys.stderr)
    return found


def saved(rows: list[isolation.Row], arguments: argparse.Namespace) -> str:
    versions = {name: getattr(sys.modules.get(name), "__version__", "") for name in LIBRARIES}
    versions |= {"torch": torch.__version__, "backfold": backfold.__version__}
    figures = [dataclasses.asdict(row) for row in rows]
    head = {"bits": arguments.bits, "steps": arguments.steps, "versions": versions}
    return json.dumps({**head, "rows": figures}, indent=1)


def measure_all(arguments: argparse.Namespace) -> list[isolation.Row]:
    find_vision_libraries()
    libraries = arguments.library or list(LIBRARIES)
    jobs = all_jobs(libraries, arguments.only, demanded=bool(arguments.library))
    if not jobs:
        sys.exit(f"bench/zoo/run.py: --only {arguments.only!r} matches none of {libraries}")
    rows: list[isolation.Row] = []
    results = isolation.measured(
        jobs,
        functools.partial(measure, bits=arguments.bits, steps=arguments.steps),
        arguments.jobs,
        arguments.timeout,
        arguments.memory,
        quiet=not arguments.verbose,
    )
    try:
        with tqdm(total=len(jobs), unit="model", smoothing=0.05) as bar:
            for row in results:
                rows.append(row)
                worst = tables.figure(row.worst) if row.errors else row.status
                bar.set_postfix_str(f"{row.name} {worst}", refresh=False)
                bar.update()
                if arguments.json:  # so that an interrupted run of an hour keeps its results
                    arguments.json.write_text(saved(rows, arguments) + "\n")
    except KeyboardInterrupt:
        print("bench/zoo/run.py: interrupted; results so far:", file=sys.stderr)
    return rows


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="may be repeated")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="shell pattern for names")
    parser.add_argument("--bits", type=float, default=4, help="mean width (default: 4)")
    parser.add_argument("--steps", type=int, default=4, help="training steps (default: 4)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds per process (default: 300)"
    )
    parser.add_argument("--memory", type=float, default=12, help="GiB per process (default: 12)")
    parser.add_argument("--json", type=pathlib.Path, metavar="OUT", help="also write all figures")
    parser.add_argument(
        "--from", dest="source", type=pathlib.Path, metavar="IN", help="show these figures; no run"
    )
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown, thirty rows")
    parser.add_argument("--rows", type=int, help="how many rows to list")
    parser.add_argument("--verbose", action="store_true", help="show what the libraries print")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.jobs < 1:
        parser.error("--steps and --jobs must be 1 or more")
    return arguments


def main() -> int:
    arguments = arguments_of()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.source:
        loaded = json.loads(arguments.source.read_text())
        arguments.steps = loaded["steps"]
        rows = [isolation.Row(**row) for row in loaded["rows"]]
    else:
        rows = measure_all(arguments)
    shown = arguments.rows or (30 if arguments.markdown else None)
    print(tables.report(rows, arguments.steps, shown, arguments.markdown))
    lacking = tables.shortcomings(rows)
    print("\n".join(["", *lacking] if lacking else []), file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
