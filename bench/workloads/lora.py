# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters around the linear layers of a model, whose own weights are frozen."""

import torch
from torch import Tensor, nn


class Adapter(nn.Module):
    """A frozen linear layer, plus a product of two thin matrices that is trained."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float, dropout: float):
        super().__init__()
        self.frozen, self.scale = frozen, scale
        self.dropout = nn.Dropout(dropout)
        kind = {"device": frozen.weight.device, "dtype": frozen.weight.dtype}
        self.down = nn.Linear(frozen.in_features, rank, bias=False, **kind)
        self.up = nn.Linear(rank, frozen.out_features, bias=False, **kind)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.scale * self.up(self.down(self.dropout(x)))


def adapt(model: nn.Module, names: list[str], rank: int = 16, dropout: float = 0.05) -> nn.Module:
    """Freezes `model` and adapts, in place, every linear layer that has one of the names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, Adapter(child, rank, 2.0, dropout))
    if not any(isinstance(module, Adapter) for module in model.modules()):
        raise ValueError(f"no linear layer is called {', '.join(names)}")
    return model


def train_inputs(model: nn.Module) -> None:
    """Lets gradients reach the first layer, which checkpoints of a frozen model need."""

    def require(_module: nn.Module, _arguments: object, result: Tensor) -> Tensor:
        return result.requires_grad_(torch.is_grad_enabled())

    model.get_input_embeddings().register_forward_hook(require)
