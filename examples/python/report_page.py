# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT-2 of transformers on a page of text and writes the report as a page.

    python examples/python/report_page.py report.html

Needs transformers and Plotly: pip install transformers 'backfold[page]'.
"""

import argparse
import pathlib
import pydoc_data.topics

import backfold
import torch
import transformers
from tqdm import tqdm


def batches(steps: int, samples: int, length: int):
    """Stretches of Python's own documentation, one token for each byte."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    tokens = torch.tensor(list(text), dtype=torch.long)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length, (samples,))
        yield torch.stack([tokens[start : start + length] for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=pathlib.Path, help="the file to write")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=128,
        bos_token_id=None,
        eos_token_id=None,
        n_positions=128,
        n_embd=192,
        n_layer=arguments.layers,
        n_head=6,
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fold = backfold.Controller(model)
    for tokens in tqdm(batches(arguments.steps, 8, 128), total=arguments.steps):
        with fold:
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fold.report().html(arguments.page)
    print(f"loss {loss.item():.3f}; the report is in {arguments.page}")


if __name__ == "__main__":
    main()
