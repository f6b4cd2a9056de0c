# SPDX-License-Identifier: Apache-2.0
"""Packing single tensors."""

import torch

from backfold._C import Packet
from backfold.codecs import Codec


def pack(
    tensor: torch.Tensor,
    bits: int = 4,
    layout: str = "flat",
    *,
    group: int = 128,
    zero_exact: bool = False,
    seed: int = 0,
    stream: int = 0,
    codec: Codec | None = None,
    op: str = "",
) -> Packet:
    """Folds a tensor to `bits` bits per element, on the current stream, without waiting for it.

    `layout` says which elements share a step: ``"flat"`` neighbours in memory, ``"strided"`` a
    column over many rows, ``"rotated"`` neighbours after a Hadamard transform. `zero_exact` is for
    tensors that are never negative: zeros stay zero and positive elements positive. The same `seed`
    and `stream` give the same bytes on every device. With `codec`, a codec of `backfold.codecs`,
    bits, layout, group and zero_exact are ignored; `op` is the operator that would save the tensor,
    for codecs that depend on it.

    >>> pack(torch.zeros(4, 256), bits=2)
    Packet(Float [4, 256], 2 bits, flat, 288 of 4096 bytes)
    >>> from backfold.codecs import Pool
    >>> pack(torch.zeros(1, 2, 16, 16), codec=Pool(8))
    Packet(Float [1, 2, 16, 16], Pool(block=8), 16 of 2048 bytes)
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if codec is not None:
        if not isinstance(codec, Codec):
            raise TypeError(f"codec must be one of backfold.codecs, got {codec!r}")
        return Packet(tensor, type(codec).__name__, vars(codec), op, seed, stream)
    return Packet(tensor, bits, layout, group, zero_exact, seed, stream)


def unpack(packet: Packet) -> torch.Tensor:
    """Decodes the tensor in a packet into new memory, with its original sizes and strides.

    >>> unpack(pack(torch.ones(2, 256))).shape
    torch.Size([2, 256])
    """
    if not isinstance(packet, Packet):
        raise TypeError(f"packet must come from backfold.pack(), got {type(packet).__name__}")
    return packet.unpack()
