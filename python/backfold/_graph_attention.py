# SPDX-License-Identifier: Apache-2.0
"""The derivative of fused attention's backward, for which torch has none."""

from __future__ import annotations

import math
from typing import Any

import torch

_aten = torch.ops.aten
_BACKWARDS = [
    getattr(_aten, f"_scaled_dot_product_{kind}_backward").default
    for kind in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    )
    if hasattr(_aten, f"_scaled_dot_product_{kind}_backward")
]
_MOST = 1 << 23  # logits at once


def attention_backward(target: Any, args: tuple, kwargs: dict) -> Any:
    """Runs a backward of fused attention so that it can be differentiated; None for others."""
    if target not in _BACKWARDS:
        return None
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    mask = given.get("attn_mask", given.get("attn_bias"))
    if given.get("dropout_p"):
        raise NotImplementedError("attention with dropout")
    grad = given.get("grad_out", given.get("grad_out_"))
    tensors = (grad, *(given[name] for name in ("query", "key", "value", "out", "logsumexp")))
    rest = (mask, bool(given.get("is_causal")), given.get("scale"))
    return _Backward.apply(lambda: target(*args, **kwargs), rest, *tensors)


class _Backward(torch.autograd.Function):
    """Gradients of query, key and value; derivatives by the formula, a few heads at a time."""

    @staticmethod
    def forward(ctx: Any, run: Any, rest: tuple, *tensors: torch.Tensor) -> tuple:
        ctx.rest = rest
        ctx.save_for_backward(*tensors)
        results = run()
        ctx.mark_non_differentiable(*(one for one in results[3:] if one is not None))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *along: torch.Tensor | None) -> tuple:
        mask, causal, scale = ctx.rest
        grad, query, key, value, out, logsumexp = ctx.saved_tensors
        if key.shape[1] != query.shape[1]:
            raise NotImplementedError("attention whose heads share keys")
        heads, rows, columns = query.shape[1], query.shape[2], key.shape[2]
        scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
        logsumexp = logsumexp[..., :rows].unsqueeze(-1)
        tensors = (grad, query, key, value, out, logsumexp)
        found = [torch.empty_like(one) for one in tensors]
        few = max(1, min(heads, _MOST // (rows * columns)))
        if mask is not None:
            mask = mask.expand(query.shape[0], heads, rows, columns)
        for sample in range(query.shape[0]):
            for first in range(0, heads, few):
                part = (sample, slice(first, first + few))
                leaves = [one[part].detach().float().requires_grad_() for one in tensors]
                offsets = None if mask is None else mask[part]
                with torch.enable_grad():
                    made = _gradients(*leaves, offsets, causal, scale)
                    wanted = [
                        (one, direction[part].float())
                        for one, direction in zip(made, along, strict=False)
                        if direction is not None
                    ]
                    total = sum((one * direction).sum() for one, direction in wanted)
                parts = torch.autograd.grad(total, leaves, allow_unused=True)
                for whole, derivative in zip(found, parts, strict=True):
                    if derivative is None:
                        whole[part] = 0
                    else:
                        whole[part] = derivative
        found[5] = None  # a statistic, which is not rounded
        return None, None, *found


def _gradients(grad, query, key, value, out, logsumexp, mask, causal, scale) -> tuple:
    """As the fused kernels compute them: from statistics of forward."""
    logits = query @ key.mT * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    if causal:
        rows, columns = logits.shape[-2:]
        after = torch.ones(rows, columns, dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(after, -math.inf)
    shares = (logits - logsumexp).exp()
    inner = (grad * out).sum(-1, keepdim=True)
    moved = shares * (grad @ value.mT - inner) * scale
    return moved @ key, moved.mT @ query, shares.mT @ grad
