# SPDX-License-Identifier: Apache-2.0
"""Folding what checkpoints start again from: held bytes and error of the gradient.

    bench/run checkpoint                 small BERT, GPT-2 and Llama of transformers, on the CPU
    bench/run checkpoint bert --layers 2 one of them, smaller
    bench/run checkpoint --markdown      as a table for the docs

The models have random weights, trained for a few steps, their usual dropout, and
gradient_checkpointing_enable(), in both variants of torch.utils.checkpoint. Rows:

    exact         bits=None: what is held and can only be folded exactly
    only W bits   the same, and all starts of checkpoints rounded to W bits, measured or not
    others        the default settings for all but the starts, which stay exact
    planned       the default settings: everything at 4 bits on average, starts as measured

Held is the report's. Error is that of the gradient of all parameters, relative to that of plain
checkpointing, root mean square over draws of the rounding; bias is that of their mean.
"""

import argparse
import warnings

import backfold
import torch
import transformers

MIB = 1 << 20
ROWS, TOKENS, WORDS = 8, 64, 256
STARTS = ("CheckpointFunction", "_NoopSaveInputs", "torch.utils.checkpoint")


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


def compare(name: str, reentrant: bool, arguments: argparse.Namespace) -> list[tuple]:
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

    def measured(label: str, fold: backfold.Controller) -> tuple:
        total = fold.check(step, repeats=arguments.repeats).rows[-1]
        report = fold.report().to_dict()
        starts = [row for row in report["sites"] if row["op"] in STARTS and row["held_bytes"]]
        widths = sorted({row["bits"] or 8 * 4 for row in starts})
        held = sum(row["held_bytes"] for row in starts)
        return label, report["held_bytes"], held, widths, total.error, total.bias

    rows = [measured("exact", backfold.Controller(model, bits=None))]
    for bits in (4, 6, 8, 16):
        codec = {backfold.codecs.Where(op=op): backfold.codecs.Quantize(bits) for op in STARTS}
        rows.append(
            measured(f"only {bits} bits", backfold.Controller(model, bits=None, codec=codec))
        )
    keep = {backfold.codecs.Where(op=op): backfold.codecs.Keep() for op in STARTS}
    for label, codec in (("others", keep), ("planned", None)):
        fold = backfold.Controller(model, probe_every=None, codec=codec)
        for _ in range(3):
            with fold:
                loss = step()
            loss.backward()
            model.zero_grad()
        rows.append(measured(label, fold))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="bert, gpt2 or llama; default: all")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="of training before the comparison")
    parser.add_argument("--repeats", type=int, default=4, help="draws of the rounding")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="backfold: codec")
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names for the same
    for name in arguments.models or ["bert", "gpt2", "llama"]:
        for reentrant in (False, True):
            variant = "reentrant" if reentrant else "not reentrant"
            for label, held, starts, widths, error, bias in compare(name, reentrant, arguments):
                bits = ", ".join(map(str, widths))
                cells = [
                    f"{name}, {variant}",
                    label,
                    bits,
                    f"{held / MIB:.2f}",
                    f"{starts / MIB:.2f}",
                    f"{error:.4f}",
                    f"{bias:.4f}",
                ]
                if arguments.markdown:
                    print("| " + " | ".join(cells) + " |", flush=True)
                else:
                    print("  ".join(f"{cell:22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
