# SPDX-License-Identifier: Apache-2.0
"""Small models of the families of diffusers, with random weights and inputs, and what the hook does
with each. Run as a program, it writes the table of docs/diffusers.md:

    python tests/python/diffusers_families.py
"""

import pathlib
import re
import warnings

import torch

LENGTH = 7  # of texts; the second one has three tokens of padding


def _text(width, length=LENGTH):
    return torch.randn(2, length, width)


def _padding(dtype=torch.int64):
    mask = torch.ones(2, LENGTH, dtype=dtype)
    mask[1, 4:] = 0
    return mask


def _image(channels, size=8):
    return torch.randn(2, channels, size, size)


def _video(channels, frames=2, size=8):
    return torch.randn(2, channels, frames, size, size)


def _time():
    return torch.tensor([3, 700])


# --- models: each function gives (class name, arguments, inputs) ----------------------------------


def dit():
    config = dict(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, sample_size=8, norm_num_groups=8
    )
    inputs = dict(hidden_states=_image(4), timestep=_time(), class_labels=torch.tensor([1, 2]))
    return "DiTTransformer2DModel", config, inputs


def pixart():
    config = dict(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, sample_size=8,
        norm_num_groups=8, cross_attention_dim=32, caption_channels=24,
        use_additional_conditions=False,
    )  # fmt: skip
    inputs = dict(
        hidden_states=_image(4), encoder_hidden_states=_text(24), timestep=_time(),
        encoder_attention_mask=_padding(), added_cond_kwargs={},
    )  # fmt: skip
    return "PixArtTransformer2DModel", config, inputs


def sd3():
    config = dict(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, caption_projection_dim=32,
        pooled_projection_dim=24, out_channels=4, pos_embed_max_size=8, qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )  # fmt: skip
    inputs = dict(
        hidden_states=_image(4), encoder_hidden_states=_text(24),
        pooled_projections=torch.randn(2, 24), timestep=_time(),
    )  # fmt: skip
    return "SD3Transformer2DModel", config, inputs


def unet():
    config = dict(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=24,
        attention_head_dim=2,
    )  # fmt: skip
    inputs = dict(
        sample=_image(4), timestep=_time(), encoder_hidden_states=_text(24),
        encoder_attention_mask=_padding(),
    )  # fmt: skip
    return "UNet2DConditionModel", config, inputs


def unet_added_kv():
    """Kandinsky 2, DeepFloyd IF: the text is appended to the keys of self-attention."""
    name, config, inputs = unet()
    config.update(
        down_block_types=("SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"),
        attention_head_dim=8,
    )
    return name, config, inputs


def unet_unconditional():
    config = dict(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    return "UNet2DModel", config, dict(sample=_image(3), timestep=_time())


def _ids(n, width, side=None):
    ids = torch.zeros(n, width)
    if side is not None:
        ids[:, 1], ids[:, 2] = torch.arange(n) // side, torch.arange(n) % side
    return ids


def flux():
    config = dict(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=24,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(2, 36, 4), encoder_hidden_states=_text(24),
        pooled_projections=torch.randn(2, 24), timestep=torch.tensor([0.3, 0.7]),
        img_ids=_ids(36, 3, 6), txt_ids=_ids(LENGTH, 3),
    )  # fmt: skip
    return "FluxTransformer2DModel", config, inputs


def chroma():
    name, config, inputs = flux()
    del config["pooled_projection_dim"], inputs["pooled_projections"]
    config.update(approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1)
    inputs["attention_mask"] = torch.cat([_padding(torch.bool), torch.ones(2, 36).bool()], 1)
    return "ChromaTransformer2DModel", config, inputs


def flux2():
    config = dict(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(2, 36, 4), encoder_hidden_states=_text(24),
        timestep=torch.tensor([0.3, 0.7]), img_ids=_ids(36, 4, 6), txt_ids=_ids(LENGTH, 4),
        guidance=torch.ones(2),
    )  # fmt: skip
    return "Flux2Transformer2DModel", config, inputs


def wan():
    config = dict(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=24,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = dict(hidden_states=_video(4), timestep=_time(), encoder_hidden_states=_text(24))
    return "WanTransformer3DModel", config, inputs


def wan_image():
    """Image to video: a second cross-attention."""
    name, config, inputs = wan()
    config.update(image_dim=24, added_kv_proj_dim=32)
    inputs["encoder_hidden_states_image"] = _text(24)
    return name, config, inputs


def hunyuan_video():
    config = dict(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, text_embed_dim=24, pooled_projection_dim=24,
        rope_axes_dim=(4, 4, 8),
    )  # fmt: skip
    inputs = dict(
        hidden_states=_video(4), timestep=_time(), encoder_hidden_states=_text(24),
        encoder_attention_mask=_padding(), pooled_projections=torch.randn(2, 24),
        guidance=torch.ones(2),
    )  # fmt: skip
    return "HunyuanVideoTransformer3DModel", config, inputs


def hunyuan_image():
    config = dict(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, text_embed_dim=24, rope_axes_dim=(8, 8),
    )  # fmt: skip
    inputs = dict(
        hidden_states=_image(4), timestep=_time().float(), encoder_hidden_states=_text(24),
        encoder_attention_mask=_padding(),
    )  # fmt: skip
    return "HunyuanImageTransformer2DModel", config, inputs


def hunyuan_dit():
    config = dict(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, patch_size=2, sample_size=8,
        hidden_size=32, num_layers=2, cross_attention_dim=24, cross_attention_dim_t5=24,
        pooled_projection_dim=24, text_len=LENGTH, text_len_t5=LENGTH,
        use_style_cond_and_image_meta_size=False,
    )  # fmt: skip
    rope = torch.randn(16, 16)
    inputs = dict(
        hidden_states=_image(4), timestep=_time().float(), encoder_hidden_states=_text(24),
        text_embedding_mask=_padding(), encoder_hidden_states_t5=_text(24),
        text_embedding_mask_t5=_padding(), image_rotary_emb=(rope.cos(), rope.sin()),
    )  # fmt: skip
    return "HunyuanDiT2DModel", config, inputs


def cogvideox():
    config = dict(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=8, text_embed_dim=24, num_layers=2, sample_width=8, sample_height=8,
        sample_frames=5, max_text_seq_length=LENGTH,
    )  # fmt: skip
    inputs = dict(
        hidden_states=_video(4).transpose(1, 2), encoder_hidden_states=_text(24), timestep=_time()
    )
    return "CogVideoXTransformer3DModel", config, inputs


def cogview3():
    config = dict(
        in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        text_embed_dim=24, time_embed_dim=8, condition_dim=8, pos_embed_max_size=8, sample_size=8,
    )  # fmt: skip
    size = torch.tensor([[64, 64]] * 2)
    inputs = dict(
        hidden_states=_image(4), encoder_hidden_states=_text(24), timestep=_time(),
        original_size=size, target_size=size, crop_coords=size * 0,
    )  # fmt: skip
    return "CogView3PlusTransformer2DModel", config, inputs


def cogview4():
    _, config, inputs = cogview3()
    config["rope_axes_dim"] = (8, 8)
    return "CogView4Transformer2DModel", config, inputs


def ltx():
    config = dict(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, num_layers=2, caption_channels=24,
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(2, 32, 4), encoder_hidden_states=_text(24), timestep=_time(),
        encoder_attention_mask=_padding(), num_frames=2, height=4, width=4,
    )  # fmt: skip
    return "LTXVideoTransformer3DModel", config, inputs


def lumina2():
    config = dict(
        sample_size=8, in_channels=4, hidden_size=48, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=8, axes_dim_rope=(4, 4, 8),
        axes_lens=(32, 32, 32), cap_feat_dim=24,
    )  # fmt: skip
    inputs = dict(
        hidden_states=_image(4), timestep=torch.rand(2), encoder_hidden_states=_text(24),
        encoder_attention_mask=_padding(torch.bool),
    )  # fmt: skip
    return "Lumina2Transformer2DModel", config, inputs


def lumina_next():
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    config = dict(
        sample_size=8, in_channels=4, hidden_size=32, num_layers=2, num_attention_heads=2,
        num_kv_heads=1, multiple_of=8, cross_attention_dim=24,
    )  # fmt: skip
    inputs = dict(
        hidden_states=_image(4), timestep=torch.rand(2), encoder_hidden_states=_text(24),
        encoder_mask=_padding(), image_rotary_emb=get_2d_rotary_pos_embed_lumina(16, 8, 8),
        cross_attention_kwargs={},
    )  # fmt: skip
    return "LuminaNextDiT2DModel", config, inputs


def qwen_image():
    config = dict(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(2, 16, 16), encoder_hidden_states=_text(24),
        encoder_hidden_states_mask=_padding(), timestep=torch.tensor([0.3, 0.7]),
        img_shapes=[(1, 4, 4)] * 2,
    )  # fmt: skip
    return "QwenImageTransformer2DModel", config, inputs


def z_image():
    config = dict(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=24, axes_dims=[4, 4, 8], axes_lens=[256, 64, 64],
    )  # fmt: skip
    inputs = dict(
        x=[torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 16)], t=torch.tensor([0.3, 0.7]),
        cap_feats=[torch.randn(7, 24), torch.randn(40, 24)],
    )  # fmt: skip
    return "ZImageTransformer2DModel", config, inputs


def sana():
    config = dict(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32,
        caption_channels=24, sample_size=8,
    )  # fmt: skip
    inputs = dict(
        hidden_states=_image(4), encoder_hidden_states=_text(24), timestep=_time(),
        encoder_attention_mask=_padding(),
    )  # fmt: skip
    return "SanaTransformer2DModel", config, inputs


def aura_flow():
    config = dict(
        sample_size=8, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=24,
        caption_projection_dim=32, pos_embed_max_size=64,
    )  # fmt: skip
    inputs = dict(hidden_states=_image(4), encoder_hidden_states=_text(24), timestep=_time() / 1000)
    return "AuraFlowTransformer2DModel", config, inputs


def mochi():
    config = dict(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=24, time_embed_dim=8, max_sequence_length=LENGTH,
    )  # fmt: skip
    inputs = dict(
        hidden_states=_video(4), encoder_hidden_states=_text(24), timestep=_time(),
        encoder_attention_mask=_padding(torch.bool),
    )  # fmt: skip
    return "MochiTransformer3DModel", config, inputs


def latte():
    config = dict(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2,
        cross_attention_dim=32, caption_channels=24, sample_size=8, patch_size=2, video_length=2,
        activation_fn="gelu-approximate", norm_type="ada_norm_single", attention_bias=True,
        norm_elementwise_affine=False, num_embeds_ada_norm=1000,
    )  # fmt: skip
    inputs = dict(hidden_states=_video(4), timestep=_time(), encoder_hidden_states=_text(24))
    return "LatteTransformer3DModel", config, inputs


def allegro():
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    config = dict(
        num_attention_heads=2, attention_head_dim=24, num_layers=2, cross_attention_dim=48,
        sample_height=8, sample_width=8, sample_frames=2, caption_channels=24,
    )  # fmt: skip
    *rope, grid_t, grid_h, grid_w = get_3d_rotary_pos_embed_allegro(
        24, crops_coords=((0, 0), (4, 4)), grid_size=(4, 4), temporal_size=2
    )
    places = torch.cartesian_prod(*(torch.as_tensor(g).long() for g in (grid_t, grid_h, grid_w)))
    grids = tuple(places.t()[:, None])
    inputs = dict(
        hidden_states=_video(4), encoder_hidden_states=_text(24), timestep=_time(),
        attention_mask=torch.ones(2, 2, 8, 8), encoder_attention_mask=_padding(),
        image_rotary_emb=(rope, grids),
    )  # fmt: skip
    return "AllegroTransformer3DModel", config, inputs


def stable_audio():
    config = dict(
        sample_size=16, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        num_key_value_attention_heads=1, out_channels=4, cross_attention_dim=16,
        time_proj_dim=8, global_states_input_dim=24, cross_attention_input_dim=24,
    )  # fmt: skip
    rope = torch.randn(17, 8)
    inputs = dict(
        hidden_states=torch.randn(2, 4, 16), timestep=torch.rand(2),
        encoder_hidden_states=_text(24), global_hidden_states=torch.randn(2, 1, 24),
        rotary_embedding=(rope.cos(), rope.sin()),
    )  # fmt: skip
    return "StableAudioDiTModel", config, inputs


def cosmos():
    config = dict(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        text_embed_dim=24, adaln_lora_dim=4, max_size=(4, 16, 16), concat_padding_mask=False,
    )  # fmt: skip
    inputs = dict(
        hidden_states=_video(4), timestep=_time(), encoder_hidden_states=_text(24), fps=30
    )
    return "CosmosTransformer3DModel", config, inputs


def prior():
    """unCLIP's prior: an additive causal mask."""
    config = dict(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, embedding_dim=24,
        num_embeddings=LENGTH,
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(2, 24), timestep=_time(), proj_embedding=torch.randn(2, 24),
        encoder_hidden_states=_text(24), attention_mask=_padding(torch.bool),
    )  # fmt: skip
    return "PriorTransformer", config, inputs


def hidream():
    config = dict(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=16, num_attention_heads=2, caption_channels=[24, 24], text_emb_dim=24,
        axes_dims_rope=(8, 4, 4), max_resolution=(8, 8), llama_layers=(0, 1),
    )  # fmt: skip
    inputs = dict(
        hidden_states=_image(4), timesteps=_time(), encoder_hidden_states_t5=_text(24),
        encoder_hidden_states_llama3=torch.randn(2, 2, LENGTH, 24),
        pooled_embeds=torch.randn(2, 24),
    )  # fmt: skip
    return "HiDreamImageTransformer2DModel", config, inputs


def omnigen():
    config = dict(
        in_channels=4, hidden_size=32, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, num_layers=2, pad_token_id=0, vocab_size=100, time_step_dim=32,
        pos_embed_max_size=16, rope_scaling=dict(short_factor=[1.0] * 8, long_factor=[1.0] * 8),
    )  # fmt: skip
    tokens = LENGTH + 1 + 16
    mask = torch.ones(2, tokens, tokens).tril()
    mask[:, LENGTH + 1 :, LENGTH + 1 :] = 1
    inputs = dict(
        hidden_states=_image(4), timestep=_time(), input_ids=torch.randint(0, 100, (2, LENGTH)),
        input_img_latents=[], input_image_sizes={}, attention_mask=mask,
        position_ids=torch.arange(tokens)[None].expand(2, -1),
    )  # fmt: skip
    return "OmniGenTransformer2DModel", config, inputs


def easy_animate():
    config = dict(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, patch_size=2,
        sample_width=8, sample_height=8, num_layers=2, mmdit_layers=1, time_embed_dim=8,
        text_embed_dim=24,
    )  # fmt: skip
    inputs = dict(hidden_states=_video(4), timestep=_time(), encoder_hidden_states=_text(24))
    return "EasyAnimateTransformer3DModel", config, inputs


def unet_video():
    config = dict(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=24,
        attention_head_dim=8,
    )  # fmt: skip
    inputs = dict(sample=_video(4), timestep=_time(), encoder_hidden_states=_text(24))
    return "UNet3DConditionModel", config, inputs


def vae():
    config = dict(
        block_out_channels=(320,), norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
    )  # fmt: skip
    return "AutoencoderKL", config, dict(sample=_image(3, 4))


FAMILIES = {
    "DiT": dit,
    "PixArt": pixart,
    "Stable Diffusion 3": sd3,
    "UNet (Stable Diffusion 1, 2, XL)": unet,
    "UNet with added keys (Kandinsky 2, IF)": unet_added_kv,
    "UNet, unconditional": unet_unconditional,
    "Flux": flux,
    "Flux 2": flux2,
    "Chroma": chroma,
    "Wan, text to video": wan,
    "Wan, image to video": wan_image,
    "HunyuanVideo": hunyuan_video,
    "HunyuanImage": hunyuan_image,
    "HunyuanDiT": hunyuan_dit,
    "CogVideoX": cogvideox,
    "CogView 3 Plus": cogview3,
    "CogView 4": cogview4,
    "LTX-Video": ltx,
    "Lumina 2": lumina2,
    "Lumina Next": lumina_next,
    "Qwen-Image": qwen_image,
    "Z-Image": z_image,
    "Sana": sana,
    "AuraFlow": aura_flow,
    "Mochi": mochi,
    "Latte": latte,
    "Allegro": allegro,
    "Stable Audio": stable_audio,
    "Cosmos": cosmos,
    "unCLIP prior": prior,
    "HiDream": hidream,
    "OmniGen": omnigen,
    "EasyAnimate": easy_animate,
    "UNet, video": unet_video,
    "Autoencoder (KL)": vae,
}


# --- a training step ------------------------------------------------------------------------------


def build(family):
    """(model, inputs) of a family, always the same."""
    import diffusers

    torch.manual_seed(0)
    name, config, inputs = FAMILIES[family]()
    model = getattr(diffusers, name)(**config)
    # Models that start at zero or with tiny embeddings would hide their attention from the loss.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("pad_token"):  # diffusers before 0.40 leaves it as memory was
                parameter.zero_()
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model, inputs


def step(model, inputs):
    """(output, {name: gradient}) of a training step."""
    model.zero_grad()
    torch.manual_seed(1)
    out = model(**inputs, return_dict=False)[0]
    out = torch.cat([o.flatten() for o in out]) if isinstance(out, (list, tuple)) else out
    out.float().square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.detach(), grads


def native_calls(model, inputs):
    """How often PyTorch's attention is called without the hook."""
    from sagebwd.integrations import torch_sdpa

    with torch.no_grad(), torch_sdpa.enabled(devices=()) as seen:  # takes no call, and counts them
        torch.manual_seed(1)
        model(**inputs, return_dict=False)
    return sum(seen.passed_on.values())


def compare(family, **options):
    """What the hook does with a family: (report, calls without the hook, relative error of the
    output, that of the gradients of the weights that make q, k and v)."""
    from sagebwd.integrations import diffusers as sage

    model, inputs = build(family)
    want, want_grads = step(model, inputs)
    with sage.enabled(**options) as seen:
        got, grads = step(model, inputs)
    assert grads.keys() == want_grads.keys()
    # Biases of keys have no gradient but rounding.
    projections = [n for n in grads if PROJECTION.search(n) and n.endswith("weight")]
    flat = lambda table: torch.cat([table[n].flatten() for n in projections])
    error = lambda a, b: ((a - b).double().norm() / b.double().norm()).item()
    return seen, native_calls(model, inputs), error(got, want), error(flat(grads), flat(want_grads))


PROJECTION = re.compile(r"to_q|to_k|to_v|to_qkv|add_[qkv]_proj|attn.*(qkv|query|key|value)")


def _table():
    import diffusers

    yield f"diffusers {diffusers.__version__}, random weights, float32, on the CPU.\n"
    yield "| family | model | attention calls | in INT8 | error, output | error, gradients | |"
    yield "|---|---|---|---|---|---|---|"
    notes = []
    for family, make in FAMILIES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen, calls, output, gradients = compare(family, fallback=True)
        notes += [reason for reason in seen.passed_on if reason not in notes]
        marks = ", ".join(str(1 + notes.index(reason)) for reason in seen.passed_on)
        numbers = f"{calls} | {seen.calls} | {output:.4f} | {gradients:.4f} | {marks}"
        yield f"| {family} | `{make()[0]}` | {numbers} |"
    yield ""
    yield from (f"{i}. {reason}" for i, reason in enumerate(notes, 1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    page = pathlib.Path(__file__).parents[2] / "docs" / "diffusers.md"
    before, _, rest = page.read_text().partition("<!-- families -->\n")
    _, _, after = rest.partition("<!-- end -->")
    table = "\n".join(_table())
    page.write_text(f"{before}<!-- families -->\n{table}\n<!-- end -->{after}")
