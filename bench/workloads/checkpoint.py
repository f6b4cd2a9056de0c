# SPDX-License-Identifier: Apache-2.0
"""Folding what checkpoints start again from: held bytes and error of the gradient.

    bench/run checkpoint                 small BERT, GPT-2 and Llama of transformers, on the CPU
    bench/run checkpoint bert --layers 2 one of them, smaller
    bench/run checkpoint --json FILE     also as a file of results, for the documents

The models have random weights, trained for a few steps, their usual dropout, and
gradient_checkpointing_enable(), in both variants of torch.utils.checkpoint. Columns:

    all inputs at W bits   inputs of checkpoints are rounded, measured or not, and nothing else is
    exact inputs           the default settings for all but these inputs, which stay exact
    default                the default settings: 4 bits on average, these inputs as measured

Held is the report's, in MiB, in all and for inputs of checkpoints. Error is that of the gradient of
all parameters, relative to that of plain checkpointing, root mean square over draws of the
rounding, and in brackets the bias of their mean. Widths are those that a plan gives to the inputs.
"""

import argparse
import pathlib
import typing
import warnings

import backfold
import torch
import transformers
from results import Results, aligned

MIB = 1 << 20
ROWS, TOKENS, WORDS = 8, 64, 256
STARTS = ("CheckpointFunction", "_NoopSaveInputs", "torch.utils.checkpoint")
NAMES = {"bert": "BERT", "gpt2": "GPT-2", "llama": "Llama"}
WIDTHS = (4, 6, 8, 16)
HEAD = ["", *(f"all inputs at {bits} bits" for bits in WIDTHS), "exact inputs: held"]
HEAD += ["exact inputs: error", "default: held", "default: error", "widths of inputs"]


class Measured(typing.NamedTuple):
    held: int  # bytes
    starts: int  # of these, what checkpoints start again from
    widths: list[int]  # of the starts
    error: float
    bias: float

    def shown_held(self) -> str:
        return f"{self.held / MIB:.2f}, {self.starts / MIB:.2f}"

    def shown_error(self) -> str:
        return f"{self.error:.4f} ({self.bias:.4f})"


def build(name: str, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    size = {"vocab_size": WORDS, "hidden_size": 128, "num_hidden_layers": layers}
    if name == "bert":
        config = transformers.BertConfig(
            **size, num_attention_heads=4, intermediate_size=512, max_position_embeddings=TOKENS
        )
        return transformers.BertForMaskedLM(config)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=128, n_layer=layers, n_head=4, n_positions=TOKENS
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        **size,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=344,
        attention_dropout=0.1,
        max_position_embeddings=TOKENS,
    )
    return transformers.LlamaForCausalLM(config)


def text(seed: int) -> torch.Tensor:
    """Words of which each makes one of a few others likely."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (ROWS, TOKENS), generator=generator)
    follows = torch.rand(ROWS, TOKENS, generator=generator) < 0.7
    for t in range(1, TOKENS):
        words[:, t] = torch.where(follows[:, t], (words[:, t - 1] * 5 + 7) % WORDS, words[:, t])
    return words


def compare(name: str, reentrant: bool, arguments: argparse.Namespace) -> dict[str, Measured]:
    model = build(name, arguments.layers).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = text(0)

    def step() -> torch.Tensor:
        return model(input_ids=words, labels=words).loss

    for i in range(arguments.steps):
        optimizer.zero_grad()
        batch = text(i + 1)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    optimizer.zero_grad()

    def measured(fold: backfold.Controller) -> Measured:
        total = fold.check(step, repeats=arguments.repeats).rows[-1]
        report = fold.report().to_dict()
        starts = [row for row in report["sites"] if row["op"] in STARTS and row["held_bytes"]]
        widths = sorted({row["bits"] or 8 * 4 for row in starts})
        held = sum(row["held_bytes"] for row in starts)
        return Measured(report["held_bytes"], held, widths, total.error, total.bias)

    found = {}
    for bits in WIDTHS:
        codec = {backfold.codecs.Where(op=op): backfold.codecs.Quantize(bits) for op in STARTS}
        found[f"{bits} bits"] = measured(backfold.Controller(model, bits=None, codec=codec))
    keep = {backfold.codecs.Where(op=op): backfold.codecs.Keep() for op in STARTS}
    for label, codec in (("exact inputs", keep), ("default", None)):
        fold = backfold.Controller(model, probe_every=None, codec=codec)
        for _ in range(3):
            with fold:
                loss = step()
            loss.backward()
            model.zero_grad()
        found[label] = measured(fold)
    return found


def row(title: str, found: dict[str, Measured]) -> list[str]:
    exact, planned = found["exact inputs"], found["default"]
    return [
        title,
        *(found[f"{bits} bits"].shown_error() for bits in WIDTHS),
        exact.shown_held(),
        exact.shown_error(),
        planned.shown_held(),
        planned.shown_error(),
        ", ".join(map(str, planned.widths)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", metavar="model", help=f"{', '.join(NAMES)}; default: all"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="of training before the comparison")
    parser.add_argument("--repeats", type=int, default=4, help="draws of the rounding")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also writes the table")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(NAMES):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    warnings.filterwarnings("ignore", message="backfold: codec")
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names for the same
    results, rows = Results("bench/run checkpoint", arguments.json), []
    for name in arguments.models or NAMES:
        for reentrant in (False, True):
            found = compare(name, reentrant, arguments)
            rows.append(row(f"{NAMES[name]}, {'' if reentrant else 'not '}reentrant", found))
            results.add("checkpoint", HEAD, rows)
    print(aligned(HEAD, rows))


if __name__ == "__main__":
    main()
