# SPDX-License-Identifier: Apache-2.0
"""Shrinks transformers configurations by the names of their fields, with a few exceptions."""

import inspect
import re
import typing

VOCABULARY = 100
FIRST_SPECIAL = 80  # token ids from here on are special: images, padding, ends
IMAGE, PATCH = 32, 8

# The first pattern that matches a field's whole name gives its largest value.
SIZES: list[tuple[str, int]] = [
    (r"upsample_groups|output_channels", 64),
    (r"num_key_value_heads|num_kv_heads|kv_heads|n_group|topk_group|index_n_heads", 2),
    (r"(linear_)?num_(key|value)_heads|linear_num_(key|value)_heads|linear_num_heads", 2),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|num_head)", 4),
    (r"(.*_)?(head_dim|d_kv|head_size|attention_head_size|d_head|kv_channels)", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_head_dim|rotary_dim", 16),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank", 16),
    (r"(.*_)?(num_hidden_layers|num_layers|n_layers?|layers|depth|num_blocks|layer_depth)", 2),
    (r"num_encoder_blocks|num_stages", 4),
    (r"(.*_)?num_(nextn_predict|mtp|kv_shared|dense)_layers|first_k_dense_replace", 1),
    (r"(moe_|shared_expert_|shared_|expert_)(intermediate|ffn_hidden)_size", 32),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|d_inner|mlp_dim|ffn_hidden_size|inner_dim)", 128),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"num_experts_per_tok|moe_topk|moe_k|num_experts_per_token|top_k|topk|router_top_k", 2),
    (r"(.*_)?(num_experts|num_local_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(.*_)?(vocab_size|num_embeddings)", VOCABULARY),
    (r"vocab_size_per_layer_input", VOCABULARY),
    (r"hidden_size_per_layer_input", 16),
    (r"type_vocab_size|num_channels|audio_channels|num_mel_bins|num_queries", 0),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|projection_dim)", 64),
    (r"dim|dim_model|(.*_)?(embedding_dim|out_hidden_size|output_dim|hidden_channels)", 64),
    (r"text_hidden_size|attention_hidden_size|feat_dim|emb_dim|lru_width|dim_feedforward", 64),
    (r"(.*_)?(output_proj_dims|encoder_hidden_dim|projector_hidden_size|fpn_hidden_size)", 64),
    (r"(pretrain_)?image_size|img_size", IMAGE),
    (r"patch_size", PATCH),
    (r"(max_source_positions|max_target_positions|n_positions|max_position_embeddings)", 64),
    (r"sliding_window|attention_window|block_size|chunk_size|attention_chunk_size", 16),
    (r"num_frames|num_position_embeddings", 16),
    (r"mamba_d_state|state_size|mamba_d_ssm|ssm_state_size", 16),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", 16),
    (r"num_conv_pos_embeddings", 16),
    (r"codebook_size|num_codevectors_per_group", 32),
    (r"num_filters|base_channels|stem_channels", 16),
    (r"upsample_initial_channel|speech_decoder_postnet_units|latent_channels", 32),
    (r"num_query_tokens|resampler_n_latents|num_latents", 8),
]
# For lists the rule applies to the entries; the second value is what entries are divided by.
DEPTHS = r"depths|num_blocks|layers|blocks|num_layers|depth|num_block_repeats"
WIDTHS = (
    r"(.*_)?(hidden_sizes|conv_dim|embed_dims|dims|tdnn_dim|neck_hidden_sizes|decoder_conv_dim)"
)


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def smaller_list(name: str, value: list | tuple) -> list | tuple:
    kind = type(value)
    if re.fullmatch(DEPTHS, name):
        return kind(min(part, 1) for part in value)
    if re.fullmatch(WIDTHS, name):
        return kind(max(part // 8, 8) for part in value)
    if re.fullmatch(r".*_(indexes|block_indices|attn_indices|layer_ids)", name):
        return kind([1])
    if name in ("image_size", "patch_size"):
        return kind(min(part, IMAGE if name == "image_size" else PATCH) for part in value)
    return value


def smaller(name: str, value: object, special: dict[str, int]) -> object:
    """The field's tiny value; `special` are the token ids given so far."""
    if re.fullmatch(r".*(token_id|token_index|token_ids?)", name):
        if is_size(value) and value >= FIRST_SPECIAL:
            return special.setdefault(name, FIRST_SPECIAL + len(special))
        return value
    if isinstance(value, (list, tuple)) and value and all(is_size(part) for part in value):
        return smaller_list(name, value)
    if is_size(value):
        for pattern, most in SIZES:
            if re.fullmatch(pattern, name):
                return min(value, most) if most else value
    return value


def per_layer(value: object, layers: int | None) -> bool:
    """Whether a list gives the kind of each layer."""
    return isinstance(value, list) and len(value) == layers and isinstance(value[0], str)


def every_kind(value: list, layers: int) -> list:
    """That many entries, distinct ones first."""
    kinds = list(dict.fromkeys(value))
    return (kinds + value)[:layers]


def tiny_sections(value: dict[str, typing.Any], half: int) -> dict[str, typing.Any]:
    """Rotations in three sections, which add up to half a head."""
    if "mrope_section" not in value:
        return value
    part = half // 4
    return {**value, "mrope_section": [half - 2 * (half - part) // 2, *[(half - part) // 2] * 2]}


def look(config: typing.Any, name: str, default: object) -> typing.Any:
    """A field's value; configurations with differing layers refuse some with their own errors."""
    try:
        return getattr(config, name, default)
    except Exception:
        return default


def fields_of(kind: type) -> dict[str, object]:
    """Names and defaults of a configuration's arguments."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    plain = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {p.name: p.default for p in plain if p.default is not p.empty}


def merged(given: dict[str, typing.Any], more: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """`given` updated with `more`, recursively."""
    result = dict(given)
    for name, value in more.items():
        inner = result.get(name)
        both = isinstance(value, dict) and isinstance(inner, dict)
        result[name] = merged(inner, value) if both else value
    return result


def tiny_fields(config: typing.Any, special: dict[str, int] | None = None) -> dict[str, typing.Any]:
    """Arguments for the class of `config` that make a tiny version of it.

    Fields are listed only if they shrink, or if `config` differs from its class's default. Fields
    derived from others (lists with an entry per layer) are left for the class to recompute.
    """
    kind, special = type(config), {} if special is None else special
    usual = kind()
    stages = any(isinstance(look(config, name, None), (list, tuple)) for name in STAGED)
    chosen: dict[str, typing.Any] = {}
    for name, default in fields_of(kind).items():
        if name in kind.sub_configs or name in ("id2label", "label2id"):
            continue
        value = look(config, name, default)
        if isinstance(value, dict) and "mrope_section" in value:
            chosen[name] = tiny_sections(value, 8)
            continue
        value = default if value == look(usual, name, default) else value
        if per_layer(value, look(config, "num_hidden_layers", None)):
            value = every_kind(value, 2)
        tiny = smaller(name, value, special)
        if name == "num_key_value_heads" and look(config, "kv_lora_rank", None):
            tiny = 4  # as many as there are heads
        if stages and name == "embed_dim" and is_size(value):
            tiny = min(value, 48)  # three heads in the first stage
        if tiny != default:
            chosen[name] = tiny
    for name in kind.sub_configs:
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            chosen[name] = {"model_type": part.model_type, **tiny_fields(part, special)}
    return chosen


STAGED = ("num_heads", "num_attention_heads")


def tiny_config(kind: type, exceptions: dict[str, typing.Any] | None = None) -> typing.Any:
    """A tiny configuration of a transformers class."""
    return kind(**merged(tiny_fields(kind()), exceptions or {}))
