# SPDX-License-Identifier: Apache-2.0
"""The linear branch against the formula in float64, with every pair of tokens written out."""

import pytest
import torch

import sagebwd


def exact(q, k, v, lists=None, mean_free_keys=True):
    """(out, norm) in float64 of q [b, h, n, d]; differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    if mean_free_keys:
        k = k - k.mean(2, keepdim=True)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = q.softmax(-1) @ k.softmax(-1).transpose(-1, -2)
    if lists is not None:
        excluded = lists.to_mask().repeat_interleave(lists.block_q, 2)[:, :, : q.shape[2]]
        excluded = excluded.repeat_interleave(lists.block_k, 3)[..., : k.shape[2]]
        weights = weights * ~excluded
    norm = weights.sum(-1)
    return weights @ v / norm.where(norm > 0, 1.0)[..., None], norm


def error(got, wanted):
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-300))


def random_lists(shape, share, generator, **blocks):
    scores = torch.rand(shape, generator=generator)
    mask = scores.argsort(-1).argsort(-1) < round(share * shape[-1])
    return sagebwd.BlockLists.from_mask(mask, **blocks)


def clustered(b, h, hk, n, nk, d, dtype, generator, share):
    """Queries look for the keys of their own cluster, and lists have the blocks of that cluster:
    what is left has little of the whole."""
    rows, columns, clusters = -(-n // 128), -(-nk // 64), 8
    centre = 4 * torch.randn(hk, clusters, d, generator=generator)
    token = lambda count: torch.arange(count) * clusters // count
    group = h // hk
    own = centre.repeat_interleave(group, 0)[:, token(n)]
    q = torch.randn(b, h, n, d, generator=generator) + own
    k = torch.randn(b, hk, nk, d, generator=generator) + centre[:, token(nk)]
    v = torch.randn(b, hk, nk, d, generator=generator)
    near = -(torch.arange(rows)[:, None] / rows - torch.arange(columns) / columns).abs()
    scores = (near + 1e-3 * torch.rand(b, h, rows, columns, generator=generator)).float()
    lists = sagebwd.BlockLists.top_k(scores, k=round((1 - share) * columns))
    return q.to(dtype), k.to(dtype), v.to(dtype), lists


CASES = [(1, 2, 2, 512, 512, 64), (2, 4, 2, 300, 700, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.97])
def test_clustered_queries(dtype, sparsity):
    g = torch.Generator().manual_seed(1)
    q, k, v, lists = clustered(1, 2, 2, 1024, 2048, 64, dtype, g, sparsity)
    wanted, wanted_norm = exact(q, k, v, lists)
    out, norm = sagebwd.linear_attention(q, k, v, exclude=lists, layout="bhsd", return_norm=True)
    assert out.dtype == dtype and out.shape == q.shape and norm.shape == q.shape[:3]
    if sparsity == 0:  # lists of all blocks: nothing is left
        assert not out.any() and not norm.any()
        return
    assert error(out, wanted) <= (1e-5 if dtype == torch.float32 else 3e-3)
    assert error(norm, wanted_norm) <= 1e-5
