# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family of transformers, from its config class alone."""

import inspect
import math
import os
import re

import torch

VOCAB = 128

# Sizes by the name of a config's field; the first pattern that matches the whole name counts.
SIZES = [
    (r"(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|decoder_hidden_size|embedding_size"
     r"|projection_dim|encoder_hidden_size|emb_dim|d_embed|conv_dim|out_hidden_size"
     r"|text_embed_dim|projector_hidden_size|hidden_size_per_layer_input|model_dim"
     r"|word_embed_proj_dim"
     r"|proj_codevector_dim|bottleneck_size|d_embedding|audio_hidden_size|text_hidden_size"
     r"|output_dim)", 64),
    (r"(num_attention_heads|n_head|n_heads|num_heads|\w*_attention_heads|attention_heads)", 4),
    (r"(num_key_value_heads|num_kv_heads|\w*_key_value_heads|n_head_kv"
     r"|num_global_key_value_heads)", 2),
    (r"(head_dim|kv_channels|d_kv|attention_head_dim|global_head_dim|attention_head_size"
     r"|linear_\w*_head_dim|swa_head_dim|swa_v_head_dim|mamba_d_head|mamba_headdim|d_head"
     r"|key_dim)", 16),
    (r"(intermediate_size|\w*ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|\w*intermediate_size"
     r"|\w*inner_dim|ffn_size|\w*ffn_hidden_size|intermediate_dim)", 64),
    (r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_decoder_layers"
     r"|num_encoder_layers|depth|n_dec_layers|num_\w*_hidden_layers|num_hidden_blocks"
     r"|encoder_num_hidden_layers|decoder_num_hidden_layers|encoder_depth)", 2),
    (r"(vocab_size|\w*_vocab_size|vocab_size_\w*)", VOCAB),
    (r"(max_position_embeddings|n_positions|max_source_positions|max_target_positions"
     r"|max_sequence_length|max_seq_len|n_ctx|seq_length|block_size_max|max_2d_position_embeddings"
     r"|original_max_position_embeddings|model_max_length)", 64),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_moe_experts"
     r"|n_experts)", 4),
    (r"(num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|top_k_experts|moe_top_k"
     r"|num_selected_experts|experts_per_token)", 2),
    (r"(n_group|topk_group|num_expert_groups|n_shared_experts|num_shared_experts|first_k_dense_replace"
     r"|num_limited_groups|moe_layer_start_index|num_dense_layers|num_nextn_predict_layers"
     r"|num_expert_group)", 1),
    (r"(q_lora_rank|o_lora_rank)", 32), (r"kv_lora_rank", 16),
    (r"(qk_rope_head_dim|qk_nope_head_dim|v_head_dim)", 16), (r"qk_head_dim", 32),
    (r"(rotary_dim|rope_dim|partial_rotary_dim)", 16),
    (r"(sliding_window|window_size|local_attention|sliding_window_size|attention_window)", 6),
    (r"(attention_chunk_size|chunk_size)", 5),
    (r"(image_size|img_size)", 32), (r"patch_size", 8), (r"temporal_patch_size", 2),
    (r"spatial_merge_size", 2), (r"(in_channels|num_channels|in_chans)", 3),
    (r"num_mel_bins", 16), (r"(mamba_n_heads|mamba_num_heads|num_mamba_heads)", 8),
    (r"(mamba_d_state|ssm_state_size|state_size|mamba_d_ssm)", 16),
    (r"(mamba_n_groups|n_groups)", 1),
    (r"(mamba_expand|expand)", 2), (r"(linear_num_key_heads|linear_num_value_heads)", 4),
    (r"index_n_heads", 4), (r"index_head_dim", 16), (r"index_topk", 8),
    (r"(altup_num_inputs|laurel_rank)", 2), (r"num_kv_shared_layers", 0),
    (r"(type_vocab_size)", 2), (r"(num_labels)", 3), (r"(codebook_size|num_codevectors)", 32),
    (r"(num_query_tokens|num_queries|num_latents|num_query|query_length)", 8), (r"d_latents", 64),
]  # fmt: skip

# Which layers of a hybrid model have attention: with two layers, the second.
HYBRID = {
    "attn_layer_indices": [1], "attn_layer_period": 2, "attn_layer_offset": 1,
    "full_attn_idxs": [1],
    "hybrid_layer_ids": [1], "hybrid_override_pattern": "M*", "full_attention_interval": 2,
}  # fmt: skip


def _shrunk(name, value, layer_kinds):
    if "drop" in name and isinstance(value, float):
        return 0.0
    if name.endswith("token_id") and isinstance(value, int) and value >= VOCAB - 1:
        return 20 + sum(map(ord, name)) % 100
    if name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
        return layer_kinds(value)
    if isinstance(value, bool) or not isinstance(value, (int, type(None))):
        return value
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            if value is None and name not in ("head_dim", "num_key_value_heads"):
                return None
            return size if value is None or name == "type_vocab_size" else min(value, size) or value
    return value


def _has_three_axes(config_class):
    """Whether the model splits its rotary channels over three position axes."""
    path = inspect.getfile(config_class).replace("configuration_", "modeling_")
    return os.path.exists(path) and "mrope_section" in open(path).read()


def tiny(config_class, **changes):
    """A config with every size small: two layers at least, one of each kind of layer."""
    default = config_class()
    fields = default.to_dict()
    subs = {}
    for name, sub in getattr(config_class, "sub_configs", {}).items():
        given = getattr(default, name, None)
        if given is not None:
            subs[name] = tiny(type(given))
    if "layer_types" in fields and fields["layer_types"] is None and "conv_L_cache" in fields:
        fields["layer_types"] = ["conv", "full_attention"]
    kinds = list(dict.fromkeys(fields.get("layer_types") or ()))
    layers = max(2, len(kinds))
    one_of_each = lambda value: [kinds[i % len(kinds)] for i in range(layers)] if kinds else value
    new = {}
    for name, value in fields.items():
        if name in subs or name in ("model_type", "transformers_version", "architectures"):
            continue
        small = _shrunk(name, value, one_of_each if name == "layer_types" else lambda v: v[:layers])
        if name in ("num_hidden_layers", "n_layer", "num_layers") and kinds:
            small = layers
        if name == "rope_parameters" and isinstance(small, dict) and _has_three_axes(config_class):
            whole = small.get("partial_rotary_factor") in (None, 1.0)
            small = dict(small, mrope_section=[2, 3, 3] if whole else [1, 1, 2])
        if name in HYBRID:
            small = HYBRID[name]
        if small != value:
            new[name] = small
    if "kv_lora_rank" in fields and "num_key_value_heads" in new:
        new["num_key_value_heads"] = 4  # latent attention has keys of its own for every head
    for number, name in enumerate(("pad_token_id", "bos_token_id", "decoder_start_token_id")):
        if name in fields and fields[name] is None:
            new[name] = number
    new.update(subs)
    new.update(changes)
    config = config_class(**new)
    if not hasattr(config, "pad_token_id"):
        config.pad_token_id = 0
    return config


def build(model_class, config, seed=0):
    """A model whose attention matters: the usual initial weights give nearly uniform attention and
    hide a wrong mask."""
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > 5e7:
        raise MemoryError(f"{count / 1e6:.0f}M parameters")
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(0, 1 / math.sqrt(p[0].numel()))
            elif "sink" in name or not torch.isfinite(p).all():
                p.normal_()
    return model
