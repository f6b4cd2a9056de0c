# SPDX-License-Identifier: Apache-2.0
"""One small member of each timm family, freshly initialised, on images of 64 x 64 where possible.

A family is the leading letters of a name, within one timm module.
"""

import contextlib
import re

import torch
from errors import Task, float_tensors

BATCH, CLASSES = 2, 10
IMAGES = [64, 128, 224, 240, 256]  # the first that a model accepts
MOST_PARAMETERS = 40_000_000
SMALL = [
    "test",
    "atto",
    "zepto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xxtiny",
    "xtiny",
    "tiny",
    "ti",
    "t",
]
MIDDLE = ["mini", "xs", "s", "small", "lite", "m", "medium", "base", "b"]
LARGE = ["l", "large", "xl", "xlarge", "giant", "g", "huge", "h", "so", "enormous"]
SIZES = SMALL + MIDDLE + LARGE


def size_of(name: str) -> tuple[int, int, str]:
    """Sorts by words, then by numbers, so that roughly the smallest of a family comes first."""
    words = [word for word in re.split(r"[_\d]+", name) if word in SIZES]
    rank = min((SIZES.index(word) for word in words), default=SIZES.index("m"))
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    return rank, numbers[0] if numbers else 0, name


def names() -> list[str]:
    import timm

    families: dict[tuple[str, str], list[str]] = {}
    for module in timm.list_modules():
        for name in timm.list_models(module=module):
            letters = re.match(r"[a-z]+(_relpos|_v2)?", name)
            families.setdefault((module, letters.group() if letters else name), []).append(name)
    return sorted(min(family, key=size_of) for family in families.values())


def model_of(name: str, image: int) -> torch.nn.Module:
    import timm

    short = {"img_size": image, "depth": 2, "embed_dim": 96, "num_heads": 3}  # vision transformers
    for options in (short, {"img_size": image, "strict_img_size": False}, {"img_size": image}):
        with contextlib.suppress(TypeError, AssertionError, ValueError, RuntimeError):
            return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return timm.create_model(name, pretrained=False, num_classes=CLASSES)


class TooLarge(ValueError):
    """Too large for a zoo in which a model takes seconds."""


def build(name: str) -> Task:
    tried = []
    for image in IMAGES:
        torch.manual_seed(0)
        try:
            model = model_of(name, image).train()
            parameters = sum(parameter.numel() for parameter in model.parameters())
            if parameters > MOST_PARAMETERS:
                raise TooLarge(f"{name} has {parameters:,} parameters")
            pixels = torch.randn(BATCH, 3, image, image)
            if any(True for _ in float_tensors(model(pixels))):
                return Task(model, lambda model=model, pixels=pixels: model(pixels))
        except TooLarge:
            raise
        except Exception as error:
            tried.append(f"{image}: {type(error).__name__}: {error}")
    raise ValueError(f"{name} accepted no image size: {'; '.join(tried)}")
