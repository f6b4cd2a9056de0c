# SPDX-License-Identifier: Apache-2.0
"""What no rule gets right: fields of some transformers configurations, inputs of some models."""

import typing
from collections.abc import Callable

import torch

Fields = dict[str, typing.Any]
Inputs = dict[str, typing.Any]

SMALL_EFFICIENTNET = {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}
SERIES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
}
WINDOWS = {"image_size": 64, "window_size": 2}
ROTATED_BY_AXES = ["glm46v", "glm4v", "glm_image", "glm_ocr", "glmga", "qwen2_5_vl", "qwen2_vl"]
THREE_AXES = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}

FIELDS: dict[str, Fields] = {
    "align": {"projection_dim": 320, "vision_config": SMALL_EFFICIENTNET},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "autoformer": SERIES,
    "bit": {"num_groups": 4},
    "cvt": {"depth": (1, 2, 3)},
    "decision_transformer": {"n_head": 4},
    "donut-swin": WINDOWS,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    "efficientnet": SMALL_EFFICIENTNET,
    "esm": {"vocab_size": 100, "pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"vocab_size": 100},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0},
    "glm5_next_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_experts": 4},
    "hunyuan_vl_text": {"head_dim": 16},
    "informer": SERIES,
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12},
    "levit": {"image_size": 64, "patch_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 96},
    "mamba2": {"num_heads": 8},
    "mask2former": {"backbone_config": WINDOWS},
    "ministral": {"head_dim": 16},
    "mobilevit": {"hidden_sizes": (32, 48, 64), "image_size": 64},
    "mobilevitv2": {"image_size": 64},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "owlv2": {"text_config": {"max_position_embeddings": 32}},
    "owlvit": {"text_config": {"max_position_embeddings": 32}},
    "patchtsmixer": {"num_input_channels": 4},
    "patchtst": {"num_input_channels": 4},
    "perceiver": {"num_latents": 16, "d_latents": 64, "num_self_attends_per_block": 2},
    "reformer": {"axial_pos_embds": False},
    "sam2_hiera_det_model": {"hidden_size": 96, "image_size": [32, 32]},
    "sam": {"vision_config": {"num_pos_feats": 32}},
    "swin": WINDOWS,
    "textnet": {"hidden_sizes": (64, 64, 128, 256, 512)},
    "time_series_transformer": SERIES,
    "vits": {"vocab_size": 100},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    **{f"{name}_text": THREE_AXES for name in ROTATED_BY_AXES},
    **{name: {"text_config": THREE_AXES} for name in ROTATED_BY_AXES},
}


def patches_in_a_row(config: typing.Any) -> Inputs:
    """Two images of four by four patches, in the layout of Qwen's vision models."""
    patch, frames = config.patch_size, getattr(config, "temporal_patch_size", 1)
    patch = patch if isinstance(patch, int) else patch[0]
    channels = getattr(config, "num_channels", getattr(config, "in_channels", 3))
    flat = torch.randn(32, channels * frames * patch**2)
    return {"hidden_states": flat, "grid_thw": torch.tensor([[1, 4, 4]] * 2)}


def patches_with_shapes(config: typing.Any) -> Inputs:
    flat = torch.randn(2, 16, config.num_channels * config.patch_size**2)
    mask = torch.ones(2, 16, dtype=torch.int32)
    return {
        "pixel_values": flat,
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4]] * 2),
    }


def series(config: typing.Any) -> Inputs:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, 1),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, future),
        "future_time_features": torch.randn(2, future, 1),
    }


def channels_over_time(config: typing.Any) -> Inputs:
    return {"past_values": torch.randn(2, config.context_length, config.num_input_channels)}


def decisions(config: typing.Any) -> Inputs:
    return {
        "states": torch.randn(2, 16, config.state_dim),
        "actions": torch.randn(2, 16, config.act_dim),
        "rewards": torch.randn(2, 16, 1),
        "returns_to_go": torch.randn(2, 16, 1),
        "timesteps": torch.arange(16).expand(2, 16),
        "attention_mask": torch.ones(2, 16),
    }


def regions(config: typing.Any) -> Inputs:
    return {
        "input_ids": torch.randint(3, 80, (2, 32)),
        "visual_feats": torch.randn(2, 10, config.visual_feat_dim),
        "visual_pos": torch.rand(2, 10, config.visual_pos_dim),
    }


INPUTS: dict[str, Callable[[typing.Any], Inputs]] = {
    "audio-spectrogram-transformer": lambda config: {
        "input_values": torch.randn(2, config.max_length, config.num_mel_bins)
    },
    "autoformer": series,
    "clap": lambda config: {
        "input_ids": torch.randint(3, 80, (2, 32)),
        "input_features": torch.randn(2, 1, 128, config.audio_config.num_mel_bins),
    },
    "decision_transformer": decisions,
    "informer": series,
    "lxmert": regions,
    "patchtsmixer": channels_over_time,
    "patchtst": channels_over_time,
    "perceiver": lambda config: {"inputs": torch.randn(2, 32, config.d_model)},
    "siglip2_vision_model": patches_with_shapes,
    "time_series_transformer": series,
}
