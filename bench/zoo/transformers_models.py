# SPDX-License-Identifier: Apache-2.0
"""Every base model in transformers, tiny, freshly initialised, with a batch it accepts.

Configurations come from shrink.py. Inputs are derived from the parameters of `forward`: text,
images, sound, alone or together; the first choice that runs and has a gradient is used.
"""

import inspect
import itertools
import typing
from collections.abc import Iterator

import torch
from errors import Task, float_tensors
from shrink import FIRST_SPECIAL, IMAGE, tiny_config
from torch import Tensor
from transformers_exceptions import FIELDS, INPUTS, Inputs, patches_in_a_row

PATCHES = ("hidden_states", "pixel_values")
BATCH, LENGTH, FRAMES, SAMPLES = 2, 32, 64, 6400


def names() -> list[str]:
    import transformers.modeling_utils  # noqa: F401 - not once more in every process
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return list(MODEL_MAPPING_NAMES)


def model_of(name: str) -> torch.nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    classes = MODEL_MAPPING_NAMES[name]
    kind = getattr(transformers, classes if isinstance(classes, str) else classes[0])
    config = tiny_config(CONFIG_MAPPING[name], FIELDS.get(name))
    return kind(config)


def first_of(config: typing.Any, *fields: str) -> typing.Any:
    """The first of the fields found in the configuration or one of its parts."""
    parts = [config, *(getattr(config, name, None) for name in type(config).sub_configs)]
    for part, field in itertools.product(parts, fields):
        value = getattr(part, field, None)
        if value is not None:
            return value
    return None


def pictures(config: typing.Any) -> list[Tensor]:
    size = first_of(config, "image_size") or IMAGE
    size = size if isinstance(size, int) else size[0]
    channels = first_of(config, "num_channels", "in_channels", "in_chans") or 3
    channels = channels if isinstance(channels, int) else 3
    frames = first_of(config, "num_frames", "frames_per_clip") or 4
    return [
        torch.randn(BATCH, channels, size, size),
        torch.randn(BATCH, frames, channels, size, size),
    ]


def sounds(config: typing.Any) -> list[Tensor]:
    """Spectrograms, in both layouts that transformers uses."""
    fields = ("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim")
    bins = first_of(config, *fields, "feature_projection_input_dim") or 80
    frames = 2 * (first_of(config, "max_source_positions") or FRAMES // 2)
    return [torch.randn(BATCH, bins, frames), torch.randn(BATCH, FRAMES, bins)]


def ids() -> Tensor:
    return torch.randint(3, FIRST_SPECIAL, (BATCH, LENGTH))


def boxes() -> Tensor:
    low = torch.randint(0, 20, (BATCH, LENGTH, 2))
    return torch.cat([low, low + torch.randint(1, 20, (BATCH, LENGTH, 2))], dim=-1)


def taken_by(model: torch.nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def candidates(model: torch.nn.Module) -> dict[str, list[Tensor]]:
    """Candidate values for every known parameter of `forward`."""
    config = model.config
    known = {
        "input_ids": lambda: [ids()],
        "decoder_input_ids": lambda: [ids()],
        "bbox": lambda: [boxes()],
        "pixel_values": lambda: pictures(config),
        "pixel_values_videos": lambda: pictures(config)[1:],
        "input_features": lambda: sounds(config),
        "input_values": lambda: [torch.randn(BATCH, SAMPLES), torch.randn(BATCH, 1, SAMPLES)],
    }
    return {name: make() for name, make in known.items() if name in taken_by(model)}


def choices(name: str, model: torch.nn.Module) -> Iterator[Inputs]:
    """All known inputs first; then one kind of input alone."""
    if name in INPUTS:
        yield INPUTS[name](model.config)
        return
    if "grid_thw" in taken_by(model) and "input_ids" not in taken_by(model):
        inputs = patches_in_a_row(model.config)
        flat = inputs.pop("hidden_states")
        yield {**inputs, next(n for n in taken_by(model) if n in PATCHES): flat}
        return
    given = candidates(model)
    pairs = [[(name, value) for value in values] for name, values in given.items()]
    yield from (dict(chosen) for chosen in itertools.product(*pairs))
    for name in sorted(given, key=lambda name: name != model.main_input_name):
        others = [pair for pair in pairs if pair[0][0] == f"decoder_{name}"]
        alone = [pair for pair in pairs if pair[0][0] == name]
        yield from (dict(chosen) for chosen in itertools.product(*alone, *others))
        yield from (dict(chosen) for chosen in itertools.product(*alone))


def build(name: str) -> Task:
    model = model_of(name).train()
    model.config.use_cache = False
    tried: list[str] = []
    state = torch.get_rng_state()
    for inputs in choices(name, model):
        torch.set_rng_state(state)
        try:
            if any(True for _ in float_tensors(model(**inputs))):
                return Task(model, lambda inputs=inputs: model(**inputs))
            tried.append("no gradient")
        except Exception as error:
            tried.append(f"{'+'.join(inputs)}: {type(error).__name__}: {error}")
    raise ValueError(f"{name} accepted none of its inputs: {'; '.join(tried[:4]) or 'none known'}")
