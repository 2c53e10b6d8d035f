# SPDX-License-Identifier: Apache-2.0
"""The linear branch of sparse-linear attention: what block lists leave out, at linear cost."""

from torch import Tensor

from . import arguments, block_lists
from ._ops import linear
from .call import dense_tensors, readable


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    exclude: block_lists.BlockLists | None = None,
    feature_map: str = "softmax",
    mean_free_keys: bool = True,
    causal: bool = False,
    layout: str = "bshd",
    return_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention of each block of queries over the key blocks that its list does **not**
    have: out = Σ (φ(q)·φ(k)) v / n with n = Σ φ(q)·φ(k), sums over the keys that are left.

    q is [b, s, h, d] and k, v are [b, sk, hk, d] (``layout="bshd"``), or both with heads before
    tokens (``"bhsd"``). h is a multiple of hk. The result has q's layout and dtype.

    exclude
        :class:`sagebwd.BlockLists`: key blocks that are left out, as a rule those that
        ``sagebwd.attention(..., blocks=lists)`` sees. None: nothing is left out.
    feature_map
        ``"softmax"``: φ is the softmax over the channels.
    mean_free_keys
        φ gets k minus its mean over the sequence. Gradients go through the mean.
    return_norm
        Also return n, float32 [b, h, s]. Gradients flow through it.

    On a GPU, kernels serve bfloat16 and float16 with head dims 64 and 128. PyTorch's matmuls serve
    the rest and say so in a warning, once for each dtype and head dim.

    Where a list leaves no key, out and n are 0, and so are their gradients. Under autocast, inputs
    are cast to its dtype; sums are float32.
    """
    if feature_map != "softmax":
        raise ValueError(f"feature_map: expected 'softmax', got {feature_map!r}")
    mean_free_keys = arguments.flag("mean_free_keys", mean_free_keys)
    return_norm = arguments.flag("return_norm", return_norm)
    if arguments.flag("causal", causal):
        raise NotImplementedError(
            "causal: linear_attention has no mask; add every key block that is not wholly in the "
            "past of its block of queries to `exclude` and pass mean_free_keys=False"
        )
    q, k, v = dense_tensors(q, k, v, layout)
    if exclude is not None:
        block_lists.check(exclude, q, k, packed=False, name="exclude")
    q, k, v = readable(q, k, v)
    options = linear.Options(mean_free_keys=mean_free_keys)
    if exclude is not None:
        options = options._replace(
            list_index=exclude.index,
            list_count=exclude.count,
            block_q=exclude.block_q,
            block_k=exclude.block_k,
        )
    out, norm = linear.forward(q, k, v, options)
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, norm) if return_norm else out
