# SPDX-License-Identifier: Apache-2.0
"""Instructions of the host in a steady step, which do not depend on how busy a machine is.

    bench/run instructions                  a 24-layer BERT of tiny sizes
    bench/run instructions gpt2 --modes plain exact
    bench/run instructions --keep DIR       also keep callgrind's files, for callgrind_annotate
    bench/run instructions --tiny           one layer and few steps, to check that it still runs

Needs valgrind with its headers and a C compiler. Each mode runs in a process of its own under
callgrind, which counts one thread on a CPU: forward and backward of the last of three steps after
twelve others. `passed` has everything below min_bytes. With min_bytes=0, `exact` is bits=None,
`packed` is bits=4, and `stored` the same with derive=False. In `evaluated` and `watched` the
forwards that are counted run under no_grad, plain and inside a block.
"""

import argparse
import contextlib
import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import typing

LAYERS, WARMUPS, STEPS = 24, 12, 3


class Mode(typing.NamedTuple):
    options: dict | None = None  # of the block, if there is one
    gradients: bool = True  # in the steps that are counted


MODES = {
    "plain": Mode(),
    "passed": Mode({"min_bytes": 1 << 40}),
    "exact": Mode({"bits": None, "min_bytes": 0}),
    "stored": Mode({"min_bytes": 0, "derive": False}),
    "packed": Mode({"min_bytes": 0}),
    "evaluated": Mode(gradients=False),
    "watched": Mode({"min_bytes": 0}, gradients=False),
}
USUAL = ["plain", "passed", "stored", "packed", "evaluated", "watched"]
REQUESTS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_TOGGLE_COLLECT; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char* name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


def bert(layers: int):
    import torch
    import transformers

    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=64,
        max_position_embeddings=32,
        attn_implementation="sdpa",
    )
    model = transformers.BertForSequenceClassification(config).train()
    tokens, labels = torch.randint(0, 64, (1, 8)), torch.zeros(1, dtype=torch.long)
    return model, lambda: model(input_ids=tokens, labels=labels).loss


def gpt2(layers: int):
    import torch
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=16, n_head=2, vocab_size=64, n_positions=16
    )
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 64, (1, 8))

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens, labels=tokens, use_cache=False).loss

    return model, loss


MODELS = {"bert": bert, "gpt2": gpt2}


def count(name: str, mode: Mode, library: str, tiny: bool) -> None:
    """Runs under callgrind."""
    import gc

    import backfold
    import torch

    requests = ctypes.CDLL(library)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = MODELS[name](1 if tiny else LAYERS)
    scope = contextlib.nullcontext()
    if mode.options is not None:
        scope = backfold.Controller(model, **mode.options)

    def step(counted: bool) -> None:
        gradients = mode.gradients or not counted
        if counted:
            requests.zero()
        with scope, torch.set_grad_enabled(gradients):
            value = loss()
        if counted:
            requests.dump(b"forward")
            requests.zero()
        if gradients:
            value.backward()
        if counted:
            requests.dump(b"backward")
        model.zero_grad(set_to_none=True)

    for _ in range(1 if tiny else WARMUPS):
        step(counted=False)
    gc.collect()
    gc.disable()
    requests.begin()
    for _ in range(STEPS):
        step(counted=True)


def instructions(path: pathlib.Path) -> int:
    lines = path.read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(("totals:", "summary:"))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", choices=MODELS, default="bert")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=USUAL)
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for callgrind's files")
    parser.add_argument("--tiny", action="store_true", help="one layer and few steps")
    parser.add_argument("--under-callgrind", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.under_callgrind:
        (mode,) = arguments.modes
        count(arguments.model, MODES[mode], arguments.under_callgrind, arguments.tiny)
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = arguments.keep or pathlib.Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        library = str(pathlib.Path(folder) / "requests.so")
        compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
        subprocess.run(compiler, input=REQUESTS, text=True, check=True)
        print(f"{arguments.model}, millions of instructions{'forward':>12}{'backward':>10}")
        for mode in arguments.modes:
            output = kept / f"{arguments.model}.{mode}"
            command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
            command += [f"--callgrind-out-file={output}", sys.executable, "-W", "ignore", __file__]
            command += [arguments.model, "--modes", mode, "--under-callgrind", library]
            command += ["--tiny"] * arguments.tiny
            # The kernels of a machine without AVX-512, which valgrind does not know.
            environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
            subprocess.run(command, env=environment, capture_output=True, check=True)
            dumps = [pathlib.Path(f"{output}.{2 * STEPS - 1 + i}") for i in range(2)]
            forward, backward = (instructions(path) / 1e6 for path in dumps)
            print(f"  {mode:28}{forward:10.2f}{backward:10.2f}", flush=True)


if __name__ == "__main__":
    main()
