# SPDX-License-Identifier: Apache-2.0
"""SageAttention's names for scripts below ``sagebwd run``, computed by sagebwd, with gradients."""

import sagebwd
from sagebwd.launch import counted

__version__ = "2.2.0+sagebwd"  # the interface, and who computes it


def _sageattn(
    q,
    k,
    v,
    tensor_layout="HND",
    is_causal=False,
    sm_scale=None,
    return_lse=False,
    *,
    attn_mask=None,
    smooth_k=True,
    dropout_p=0.0,
    scale=None,
    recipe="vectorwise",
):
    """SageAttention's sageattn. ``attn_mask``, ``dropout_p`` and ``scale`` are for callers who use
    it as PyTorch's attention; the original ignores them."""
    if dropout_p:
        raise NotImplementedError(
            f"sagebwd: dropout_p={dropout_p} is not supported; pass 0.0 (dropout outside of "
            "attention may stay)"
        )
    if scale is not None and sm_scale is not None:
        raise ValueError("sm_scale, scale: expected one of them, two names of one argument")
    return sagebwd.sageattn(
        q,
        k,
        v,
        tensor_layout,
        is_causal,
        scale if sm_scale is None else sm_scale,
        return_lse,
        attn_mask=attn_mask,
        smooth_k=smooth_k,
        recipe=recipe,
    )


def _kernel(*choices):
    """One of SageAttention's kernels by its name. ``choices`` are arguments that choose how the
    kernel rounds; here all kernels are one, whose rounding is that of the recipe."""

    def call(q, k, v, tensor_layout="HND", **options):
        for name in choices:
            options.pop(name, None)
        return _sageattn(q, k, v, tensor_layout, **options)

    return counted("sageattention", call)


sageattn = counted("sageattention", _sageattn)
sageattn_varlen = counted("sageattention", sagebwd.sageattn_varlen)
sageattn_qk_int8_pv_fp16_triton = _kernel("quantization_backend")
sageattn_qk_int8_pv_fp16_cuda = _kernel("qk_quant_gran", "pv_accum_dtype", "smooth_v")
sageattn_qk_int8_pv_fp8_cuda = _kernel("qk_quant_gran", "pv_accum_dtype", "smooth_v")
sageattn_qk_int8_pv_fp8_cuda_sm90 = _kernel("qk_quant_gran", "pv_accum_dtype", "smooth_v")
