# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, offloading, plans and derivation at once, on a model of another library."""

import contextlib

import backfold
import pytest
import torch

transformers = pytest.importorskip("transformers")


def bert(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=128,
        max_position_embeddings=64,
    )
    return transformers.BertForSequenceClassification(config).to(device).train()


def trained(device, checkpoints, options):
    """The parameters after four steps, and what the last one held; options of None are plain."""
    model = bert(device)
    if checkpoints:
        model.gradient_checkpointing_enable()
    fold = None if options is None else backfold.Controller(model, min_bytes=1024, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.randint(128, (8, 64), generator=torch.Generator().manual_seed(1)).to(device)
    labels = torch.arange(8, device=device) % 2
    torch.manual_seed(2)
    for _ in range(4):
        with fold or contextlib.nullcontext():
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = [parameter.detach() for parameter in model.parameters()]
    return parameters, None if fold is None else fold.report().to_dict()


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.usefixtures("deterministic")
def test_remedies_combine(device, checkpoints):
    plain, _ = trained(device, checkpoints, None)
    exact, whole = trained(device, checkpoints, {"bits": None})
    sent, offloaded = trained(device, checkpoints, {"bits": None, "offload": True})
    assert equal(exact, plain) and equal(sent, plain)
    folded, few = trained(device, checkpoints, {})
    folded_away, few_away = trained(device, checkpoints, {"offload": True})
    assert equal(folded, folded_away) and not equal(folded, plain)
    # Four steps of AdamW move a weight by 4e-3; rounding changes what is left of that.
    assert max((a - b).abs().max().item() for a, b in zip(folded, plain, strict=True)) < 8e-3
    assert few["held_bytes"] < whole["held_bytes"] / 3
    for here, away in ((whole, offloaded), (few, few_away)):
        assert away["held_bytes"] + away["offloaded_bytes"] == pytest.approx(here["held_bytes"])
    # What backward reads first stays: of two checkpoints, everything.
    assert (offloaded["offloaded_bytes"] > 0) == (not checkpoints)
