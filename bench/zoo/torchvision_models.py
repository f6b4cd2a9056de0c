# SPDX-License-Identifier: Apache-2.0
"""One small member of each torchvision family: images, masks, boxes, video, optical flow."""

import typing
from collections.abc import Callable

import torch
from errors import Task
from torch import Tensor

BATCH, CLASSES, IMAGE = 2, 10, 64


def pictures(size: int = IMAGE) -> Tensor:
    return torch.randn(BATCH, 3, size, size)


def films(frames: int) -> Tensor:
    return torch.randn(BATCH, 3, frames, IMAGE, IMAGE)


def called_with(*inputs: Tensor) -> Callable[[torch.nn.Module], object]:
    return lambda model: model(*inputs)


def boxes() -> Callable[[torch.nn.Module], object]:
    """Detectors take images and their annotations, and return losses."""
    images = [torch.rand(3, IMAGE, IMAGE) for _ in range(BATCH)]
    corners = torch.tensor([[4.0, 4.0, 40.0, 36.0], [20.0, 24.0, 60.0, 60.0]])
    targets = [{"boxes": corners, "labels": torch.tensor([1, 2])} for _ in images]
    return lambda model: model(images, targets)


# Arguments of the builder, and the model's inputs.
PICTURES: dict[str, dict[str, typing.Any]] = {
    "alexnet": {},
    "convnext_tiny": {},
    "densenet121": {},
    "efficientnet_b0": {},
    "efficientnet_v2_s": {},
    "googlenet": {"init_weights": True},
    "mnasnet0_5": {},
    "mobilenet_v2": {},
    "mobilenet_v3_large": {},
    "mobilenet_v3_small": {},
    "regnet_x_400mf": {},
    "regnet_y_400mf": {},
    "resnet18": {},
    "resnet50": {},
    "resnext50_32x4d": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "swin_t": {},
    "swin_v2_t": {},
    "fcn_resnet50": {"weights_backbone": None},
    "deeplabv3_mobilenet_v3_large": {"weights_backbone": None},
    "lraspp_mobilenet_v3_large": {"weights_backbone": None},
}
FRAMES = {"mc3_18": 4, "r2plus1d_18": 4, "r3d_18": 4, "swin3d_t": 4}
DETECTORS = ["fcos_resnet50_fpn", "retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large"]
MOTION = ["raft_small"]


def names() -> list[str]:
    return sorted(["inception_v3", "vit", *PICTURES, *FRAMES, *DETECTORS, *MOTION])


def build(name: str) -> Task:
    import torchvision

    def make(**options: typing.Any) -> torch.nn.Module:
        return torchvision.models.get_model(name, weights=None, **options).train()

    if name == "inception_v3":
        model = make(num_classes=CLASSES, init_weights=True, aux_logits=False)
        call = called_with(pictures(96))
    elif name == "vit":
        model = torchvision.models.VisionTransformer(IMAGE, 16, 2, 4, 64, 128, num_classes=CLASSES)
        model, call = model.train(), called_with(pictures())
    elif name in FRAMES:
        model, call = make(num_classes=CLASSES), called_with(films(FRAMES[name]))
    elif name in DETECTORS:
        sizes = {} if name.startswith("ssd") else {"min_size": IMAGE, "max_size": IMAGE}
        model = make(weights_backbone=None, **sizes)
        call = boxes()
    elif name in MOTION:
        model, call = make(), called_with(pictures(128), pictures(128))
    else:
        model, call = make(num_classes=CLASSES, **PICTURES[name]), called_with(pictures())
    return Task(model, lambda: call(model))
