#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Memory, time and error of a training step whose model is compiled.

For each way to train it prints the most memory that forward allocates at any time, what it leaves
allocated, and the most that backward has, in MiB; the step's time; and, on the batch at hand, the
error of the gradient / its norm, over 8 steps. A plan has the bytes that one width takes.

    bench/run compiled                                               six transformer blocks
    bench/run compiled --model gpt2 llama resnet --backend aot_eager  models of transformers
    bench/run compiled --device cuda                                 larger ones, on a GPU
    bench/run compiled --json FILE         also the table without times, for the documents
"""

import argparse
import contextlib
import pathlib
import sys
import time
from collections.abc import Callable

import backfold
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "workloads"))
from results import Results

MODELS = ["blocks", "gpt2", "llama", "resnet"]
QUANTITIES = ["peak of forward", "held after forward", "peak of backward"]


class Block(nn.Module):
    """A block of a transformer, with fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


def blocks(device: str) -> tuple[nn.Module, Callable]:
    layers, width, rows, tokens = (12, 1024, 8, 512) if device == "cuda" else (6, 128, 8, 128)
    model = nn.Sequential(*[Block(width, width // 64) for _ in range(layers)]).to(device)
    x = torch.randn(rows, tokens, width, device=device)
    target = torch.randn(rows, tokens, width, device=device)
    return model, lambda: F.mse_loss(model(x), target)


def language_model(name: str, device: str) -> tuple[nn.Module, Callable]:
    import transformers

    layers, width, rows, tokens = (4, 1024, 8, 512) if device == "cuda" else (2, 128, 4, 64)
    heads, words = width // 64, 8192
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, n_positions=tokens
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=3 * width,
            num_attention_heads=heads,
            vocab_size=words,
            max_position_embeddings=tokens,
        )
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config).to(device)
    ids = torch.randint(words, (rows, tokens), device=device)
    return model, lambda: model(input_ids=ids, labels=ids).loss


def resnet(device: str) -> tuple[nn.Module, Callable]:
    import transformers

    rows, size = (64, 224) if device == "cuda" else (8, 64)
    config = transformers.ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], num_labels=10)
    config.hidden_sizes = [64, 128, 256, 512]
    model = transformers.ResNetForImageClassification(config).to(device)
    x = torch.randn(rows, 3, size, size, device=device)
    target = torch.randint(10, (rows,), device=device)
    return model, lambda: F.cross_entropy(model(pixel_values=x).logits, target)


def memory_on_cpu(step: Callable) -> list[float]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = step()
        with record_function("backward"):
            loss.backward()
    events = profiled.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == "backward")
    now, peaks, held = 0, [0, 0], 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() != "[memory]":
            continue
        now += event.nbytes()
        phase = event.start_ns() >= begin
        peaks[phase] = max(peaks[phase], now)
        held = held if phase else now
    return [bytes_ / 2**20 for bytes_ in (peaks[0], held, peaks[1])]


def memory_on_gpu(step: Callable) -> list[float]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = step()
    found = [torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    found.append(torch.cuda.max_memory_allocated() - before)
    return [bytes_ / 2**20 for bytes_ in found]


def milliseconds(step: Callable, device: str, times: int = 5) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        step().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return 1e3 * sorted(taken)[times // 2]


def gradients(model: nn.Module, step: Callable) -> list[torch.Tensor]:
    step().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def energy(tensors: list[torch.Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def held_bytes(fold: backfold.Controller) -> int:
    return fold.report().to_dict()["held_bytes"]


def built(name: str, device: str) -> tuple[nn.Module, Callable]:
    if name == "blocks":
        return blocks(device)
    return resnet(device) if name == "resnet" else language_model(name, device)


def compare(name: str, options: argparse.Namespace) -> dict[str, list[str]]:
    """By way to train: memory as in QUANTITIES, and the error of the gradient."""
    torch.manual_seed(0)
    torch._dynamo.reset()  # graphs of the last model count towards the limit of the function
    model, loss_of = built(name, options.device)
    forward = torch.compile(loss_of, backend=options.backend)
    bits = options.bits
    kept = 0

    def planned(**more: bool) -> backfold.Controller:
        return backfold.Controller(model, budget=kept, probe_steps=(2,), probe_every=None, **more)

    ways = {
        "plain": contextlib.nullcontext,
        "`bits=None`": lambda: backfold.Controller(model, bits=None),
        f"{bits} bits, one width": lambda: backfold.Controller(model, bits=bits, adaptive=False),
        "planned": planned,
        "planned, offloaded": lambda: planned(offload=True),
    }
    clean: list[torch.Tensor] = []
    found = {}
    for way, make in ways.items():
        block = make()

        def step(block=block) -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            with block:
                return forward()

        for _ in range(4):  # compiles, and measures
            step().backward()
        model.zero_grad(set_to_none=True)  # what is freed later must not count
        memory = memory_on_gpu(step) if options.device == "cuda" else memory_on_cpu(step)
        text = " ".join(f"{value:8.1f}" for value in memory)
        text += f", {milliseconds(step, options.device):8.1f} ms"
        error = ""
        if not clean:
            clean = [gradient.clone() for gradient in gradients(model, step)]
        else:
            errors = [
                energy([a - b for a, b in zip(gradients(model, step), clean, strict=True)])
                for _ in range(8)
            ]
            error = f"{(sum(errors) / 8 / energy(clean)) ** 0.5:.4f}"
            kept = held_bytes(block)
            text += f", error {error}, report {kept / 2**20:8.1f}"
        print(f"{way:20} {', '.join(QUANTITIES)}, MiB: {text}", flush=True)
        found[way] = [*(f"{value:.1f}" for value in memory), error]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench/run compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--model", nargs="+", default=MODELS[:1], choices=MODELS)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    results = Results("bench/run compiled", options.json)
    for name in options.model:
        if len(options.model) > 1:
            print(name)
        found = compare(name, options)
        head = ["one step, MiB", *found]
        quantities = [*QUANTITIES, "error of the gradient / its norm"]
        rows = [list(row) for row in zip(quantities, *found.values(), strict=True)]
        results.add(name, head, rows)


if __name__ == "__main__":
    main()
