# SPDX-License-Identifier: Apache-2.0
"""Helpers that read a controller's state."""

import base64

import torch


def tensor_in(saved: dict) -> torch.Tensor:
    """A tensor as state_dict() writes it: its numbers in base64."""
    numbers = torch.frombuffer(bytearray(base64.b64decode(saved["float32"])), dtype=torch.float)
    return numbers.view(saved["shape"])
