# SPDX-License-Identifier: Apache-2.0
"""Attention as trainers call it, each site beside exact attention with its gradients. Run as a
program (below ``sagebwd run``) it prints {site: [errors of out, dq, dk, dv]} as JSON. It must not
import sagebwd.

The sites have the imports, layouts and arguments that their trainers have; no line is copied."""

import json
import sys

import torch
import torch.nn.functional as F

B, S, H, D = 2, 96, 4, 64
LENGTHS = [96, 70]
SITES = {}


def site(trainer, **options):
    def add(function):
        SITES[f"{trainer}: {function.__name__}"] = function, options
        return function

    return add


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


# --- DiffSynth-Studio, FastVideo: plain calls on heads that were folded into channels -------------


@site("DiffSynth")
def folded_flash(q, k, v):
    import flash_attn

    q, k, v = (t.flatten(2).unflatten(2, (H, D)) for t in (q, k, v))
    return flash_attn.flash_attn_func(q, k, v)


@site("DiffSynth")
def folded_sage(q, k, v):
    from sageattention import sageattn

    q, k, v = (t.flatten(2).unflatten(2, (H, D)).permute(0, 2, 1, 3) for t in (q, k, v))
    return sageattn(q, k, v).permute(0, 2, 1, 3)


@site("FastVideo", causal=True)
def causal_flash(q, k, v):
    from flash_attn import flash_attn_func as flash_attn_2_func

    return flash_attn_2_func(q, k, v, softmax_scale=D**-0.5, causal=True)


@site("FastVideo")
def sage_tokens_first(q, k, v):
    from sageattention import sageattn

    return sageattn(q, k, v, tensor_layout="NHD", is_causal=False, sm_scale=D**-0.5)


# --- musubi-tuner, sd-scripts: one call for each entry, or offsets that name the padding ----------


@site("musubi-tuner", lengths=LENGTHS)
def split_flash(q, k, v):
    from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_func  # noqa: F401

    rows = []
    for i, n in enumerate(LENGTHS):
        row = flash_attn_func(q[i : i + 1, :n], k[i : i + 1, :n], v[i : i + 1, :n], 0.0)
        rows.append(F.pad(row, (0, 0, 0, 0, 0, S - n)))
    return torch.cat(rows)


def offsets():
    ends = [0]
    for i, n in enumerate(LENGTHS):
        ends += [i * S + n, (i + 1) * S]
    return torch.tensor(ends, dtype=torch.int32)


@site("musubi-tuner", lengths=LENGTHS)
def padded_flash_varlen(q, k, v):
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    cu, rows = offsets(), [t.reshape(B * S, H, D) for t in (q, k, v)]
    return flash_attn_varlen_func(*rows, cu, cu, S, S, 0.0).view(B, S, H, D)


@site("musubi-tuner", lengths=LENGTHS)
def padded_sage_varlen(q, k, v):
    from sageattention import sageattn_varlen

    cu, rows = offsets(), [t.reshape(B * S, H, D) for t in (q, k, v)]
    return sageattn_varlen(*rows, cu, cu, S, S).view(B, S, H, D)


@site("sd-scripts")
def sdpa(q, k, v):
    return F.scaled_dot_product_attention(*heads_first(q, k, v), dropout_p=0.0).transpose(1, 2)


@site("sd-scripts", lengths=LENGTHS)
def unpadded_flash(q, k, v):
    from flash_attn import flash_attn_varlen_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    q, indices, cu, longest, _ = unpad_input(q, mask)
    k, v = (index_first_axis(t.flatten(0, 1), indices) for t in (k, v))
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
        dropout_p=0.0, causal=False, softmax_scale=D**-0.5,
    )  # fmt: skip
    return pad_input(out, indices, B, S)


# --- SimpleTuner: PyTorch's function replaced; one of SageAttention's kernels; packed q, k, v -----


@site("SimpleTuner")
def sage_in_place_of_sdpa(q, k, v):
    from sageattention import sageattn

    original = F.scaled_dot_product_attention

    def sage(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        try:
            return sageattn(query, key, value, tensor_layout="HND", is_causal=is_causal)
        except Exception:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)

    F.scaled_dot_product_attention = sage
    try:
        return F.scaled_dot_product_attention(*heads_first(q, k, v)).transpose(1, 2)
    finally:
        F.scaled_dot_product_attention = original


@site("SimpleTuner", causal=True)
def named_kernel(q, k, v):
    from sageattention import sageattn_qk_int8_pv_fp8_cuda as kernel

    out = kernel(*heads_first(q, k, v), is_causal=True, pv_accum_dtype="fp32+fp32")
    return out.transpose(1, 2)


@site("SimpleTuner", lengths=LENGTHS)
def packed_flash(q, k, v):
    import flash_attn

    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    indices = mask.flatten().nonzero().flatten()
    cu = F.pad(mask.sum(1).cumsum(0, dtype=torch.int32), (1, 0))
    qkv = torch.stack([q, k, v], 2).flatten(0, 1).index_select(0, indices)
    function = flash_attn.flash_attn_varlen_qkvpacked_func
    out = function(qkv, cu, max(LENGTHS), 0.0, softmax_scale=None, causal=False)
    return q.new_zeros(B * S, H, D).index_copy(0, indices, out).view(B, S, H, D)


# --- diffusion-pipe, ai-toolkit: masks that name padding ------------------------------------------


@site("diffusion-pipe", keys=LENGTHS)
def key_mask(q, k, v):
    mask = (torch.arange(S) < torch.tensor(LENGTHS)[:, None])[:, None, None]
    out = F.scaled_dot_product_attention(*heads_first(q, k, v), attn_mask=mask, dropout_p=0.0)
    return out.transpose(1, 2)


@site("ai-toolkit", causal=True)
def sdpa_causal(q, k, v):
    out = F.scaled_dot_product_attention(*heads_first(q, k, v), is_causal=True)
    return out.transpose(1, 2).contiguous()


# --- Unsloth: FlashAttention with a window --------------------------------------------------------


@site("Unsloth", causal=True, window=31)
def window_flash(q, k, v):
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, causal=True, window_size=(31, 31))


def exact(q, k, v, causal=False, lengths=None, keys=None, window=None):
    """In float64; padding gets 0 where ``lengths`` says so."""
    seen = torch.ones(B, 1, S, S, dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if window is not None:
        seen = seen.triu(-window)
    if lengths or keys:
        seen = seen & (torch.arange(S) < torch.tensor(lengths or keys)[:, None])[:, None, None]
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
    p = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v)
    if lengths:
        out = out * (torch.arange(S) < torch.tensor(lengths)[:, None])[..., None, None]
    return out


def errors(function, options):
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, B, S, H, D)
    if "lengths" in options:  # padding has no gradient
        dout = dout * (torch.arange(S) < torch.tensor(LENGTHS)[:, None])[..., None, None]

    def results(compute, *tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = compute(*leaves)
        grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
        if "lengths" in options:
            inside = (torch.arange(S) < torch.tensor(LENGTHS)[:, None])[..., None, None]
            out = out * inside
        return out.detach(), *grads

    got = results(function, q, k, v)
    want = results(lambda *t: exact(*t, **options), q.double(), k.double(), v.double())
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({name: errors(*entry) for name, entry in SITES.items()}, sys.stdout)
