# SPDX-License-Identifier: Apache-2.0
"""The workloads: unmodified models from public libraries, random weights, one random batch each.

A builder runs under `torch.device`, so that weights and data are created where they are used. Its
argument `tiny` shrinks every size until a step takes a fraction of a second on a CPU. Those of
CAPPED also take a batch.
"""

import contextlib
import functools
import itertools
import typing
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Workload(typing.NamedTuple):
    title: str
    model: torch.nn.Module
    loss: Callable[[], torch.Tensor]  # forward, up to the loss
    block: str = ""  # class of the modules that checkpointing wraps


@contextlib.contextmanager
def checkpointed(workload: Workload, every: int = 1, **options: typing.Any) -> Iterator[None]:
    """Runs every block, or every `every`th, under non-reentrant checkpointing with the options."""
    blocks = [m for m in workload.model.modules() if type(m).__name__ == workload.block][::every]
    if not blocks:
        raise ValueError(f"{workload.title}: no block to checkpoint")
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # uncovers the method of the class


def image_classifier(title: str, model: torch.nn.Module, batch: int, size: int, block: str):
    images = torch.randn(batch, 3, size, size)
    labels = torch.randint(0, 1000, (batch,))
    return Workload(
        title, model, lambda: functional.cross_entropy(model(images), labels), block=block
    )


def resnet50(tiny: bool, batch: int = 0) -> Workload:
    import torchvision

    usual, size = (2, 64) if tiny else (128, 224)
    batch = batch or usual
    title = f"ResNet-50, {batch}x3x{size}x{size}, TF32"
    return image_classifier(title, torchvision.models.resnet50(), batch, size, "Bottleneck")


def swin_t(tiny: bool, batch: int = 0) -> Workload:
    import torchvision

    usual, size = (2, 64) if tiny else (64, 224)
    batch = batch or usual
    title = f"Swin-T, {batch}x3x{size}x{size}, TF32"
    return image_classifier(title, torchvision.models.swin_t(), batch, size, "SwinTransformerBlock")


def vit_b(tiny: bool) -> Workload:
    import torchvision

    # Two images would have nothing that is large enough to be folded.
    batch, size = (8, 64) if tiny else (64, 224)
    model = torchvision.models.VisionTransformer(
        image_size=size,
        patch_size=16,
        num_layers=2 if tiny else 12,
        num_heads=4 if tiny else 12,
        hidden_dim=64 if tiny else 768,
        mlp_dim=256 if tiny else 3072,
    )
    title = f"ViT-B/16, {batch}x3x{size}x{size}, TF32"
    return image_classifier(title, model, batch, size, "EncoderBlock")


def diffusion(tiny: bool) -> Workload:
    """The error of the predicted noise, at a random step for each image."""
    from unet import Unet

    batch, size, base, multiples = (2, 16, 32, (1, 2)) if tiny else (32, 64, 128, (1, 2, 2, 4))
    model = Unet(base, multiples, size, attends_to=8 if tiny else 16).train()
    images, noise = torch.randn(2, batch, 3, size, size)
    steps = torch.randint(0, 1000, (batch,))
    kept = torch.cos(steps / 1000 * torch.pi / 2)[:, None, None, None]  # share of the image
    noisy = kept * images + (1 - kept.square()).sqrt() * noise
    return Workload(
        f"diffusion U-Net of {base} channels, {batch}x3x{size}x{size}, TF32",
        model,
        lambda: functional.mse_loss(model(noisy, steps), noise),
        block="Stage",
    )


def bert(tiny: bool, batch: int = 0, *, attention: str, tokens: int = 256) -> Workload:
    import transformers

    usual, length = (2, 32) if tiny else (32, tokens)
    batch = batch or usual
    config = transformers.BertConfig(
        hidden_size=64 if tiny else 1024,
        num_hidden_layers=2 if tiny else 24,
        num_attention_heads=4 if tiny else 16,
        intermediate_size=256 if tiny else 4096,
        attn_implementation=attention,
    )
    model = transformers.BertForSequenceClassification(config).train()
    ids = torch.randint(0, config.vocab_size, (batch, length))
    labels = torch.randint(0, config.num_labels, (batch,))
    return Workload(
        f"BERT-large, {batch}x{length}, {attention} attention, TF32",
        model,
        lambda: model(input_ids=ids, labels=labels).loss,
        block="BertLayer",
    )


def gpt2(tiny: bool, autocast: bool) -> Workload:
    import transformers

    batch, length = (2, 64) if tiny else (8, 1024)
    config = transformers.GPT2Config(
        vocab_size=512 if tiny else 50257,
        n_positions=length,
        n_embd=64 if tiny else 1024,
        n_layer=2 if tiny else 24,
        n_head=4 if tiny else 16,
        attn_implementation="sdpa",
    )
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, config.vocab_size, (batch, length))

    def loss() -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    precision = "bf16 autocast" if autocast else "TF32"
    return Workload(f"GPT-2 medium, {batch}x{length}, {precision}", model, loss, block="GPT2Block")


def llama(tiny: bool, *, adapted: bool = False) -> Workload:
    """`adapted` freezes the weights and trains low-rank adapters of all linear layers."""
    import transformers
    from lora import adapt, train_inputs

    batch, length = (2, 64) if tiny else (4, 4096)
    config = transformers.LlamaConfig(
        vocab_size=512 if tiny else 32000,
        hidden_size=64 if tiny else 2048,
        intermediate_size=176 if tiny else 5632,
        num_hidden_layers=2 if tiny else 22,
        num_attention_heads=8 if tiny else 32,
        num_key_value_heads=2 if tiny else 4,
        max_position_embeddings=length,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    if adapted:
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        adapt(model, [*attention, "gate_proj", "up_proj", "down_proj"])
        train_inputs(model)
    ids = torch.randint(0, config.vocab_size, (batch, length))
    return Workload(
        f"Llama 1.1B, {batch}x{length}, bf16 weights" + (", LoRA of rank 16" if adapted else ""),
        model,
        lambda: model(input_ids=ids, labels=ids, use_cache=False).loss,
        block="LlamaDecoderLayer",
    )


def mixtral(tiny: bool) -> Workload:
    import transformers

    batch, length = (2, 64) if tiny else (4, 2048)
    config = transformers.MixtralConfig(
        vocab_size=512 if tiny else 32000,
        hidden_size=64 if tiny else 1024,
        intermediate_size=96 if tiny else 2048,
        num_hidden_layers=2 if tiny else 8,
        num_attention_heads=4 if tiny else 16,
        num_key_value_heads=2 if tiny else 8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=length,
        output_router_logits=True,  # the loss that balances the experts
        attn_implementation="sdpa",
    )
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.randint(0, config.vocab_size, (batch, length))
    return Workload(
        f"Mixtral of {config.num_hidden_layers} layers, 8 experts, {batch}x{length}, bf16 weights",
        model,
        lambda: model(input_ids=ids, labels=ids, use_cache=False).loss,
        block="MixtralDecoderLayer",
    )


class GCN(torch.nn.Module):
    def __init__(self, widths: list[int]):
        import torch_geometric.nn

        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(torch_geometric.nn.GCNConv(*pair) for pair in pairs)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(width) for width in widths[1:-1])

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = functional.dropout(norm(conv(x, edges)).relu(), 0.5, self.training)
        return self.convs[-1](x, edges)


def gcn(tiny: bool) -> Workload:
    nodes, edge_count = (1000, 7000) if tiny else (169_343, 1_166_243)
    model = GCN([128, 256, 256, 40]).train()
    x = torch.randn(nodes, 128)
    edges = torch.randint(0, nodes, (2, edge_count))
    labels = torch.randint(0, 40, (nodes,))
    return Workload(
        f"GCN 128-256-256-40, {nodes:,} nodes, {edge_count:,} edges, TF32",
        model,
        lambda: functional.cross_entropy(model(x, edges), labels),
    )


BUILDERS: dict[str, Callable[[bool], Workload]] = {
    "resnet50": resnet50,
    "swin_t": swin_t,
    "bert": functools.partial(bert, attention="sdpa"),
    "bert_eager": functools.partial(bert, attention="eager"),
    "gpt2": functools.partial(gpt2, autocast=True),
    "llama": llama,
    "gcn": gcn,
    "gpt2_tf32": functools.partial(gpt2, autocast=False),
    "vit_b": vit_b,
    "diffusion": diffusion,
    "mixtral": mixtral,
    "llama_lora": functools.partial(llama, adapted=True),
}

CAPPED: dict[str, Callable[[bool, int], Workload]] = {
    "resnet50": resnet50,
    "swin_t": swin_t,
    "bert": functools.partial(bert, attention="eager", tokens=128),
}
