# SPDX-License-Identifier: Apache-2.0
"""sagebwd.leaks: it finds what leaks, and only that."""

import math

import pytest
import torch

import sagebwd
from sagebwd.tools import leakage

SMALL = dict(tokens=40, heads=2, head_dim=16)


def rows_alone(q, k, v, ahead=0):
    """Attention [b, s, h, d] one query at a time, which sees ``ahead`` keys too many."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.double().repeat_interleave(group, 2) for t in (k, v))
    out, lse = [], []
    first = k.shape[1] - q.shape[1]
    for i in range(q.shape[1]):
        seen = slice(0, min(first + i + 1 + ahead, k.shape[1]))
        logits = torch.einsum("bhd,bkhd->bhk", q[:, i].double(), k[:, seen]) / q.shape[-1] ** 0.5
        out.append(torch.einsum("bhk,bkhd->bhd", logits.softmax(-1), v[:, seen]))
        lse.append(logits.logsumexp(-1))
    return torch.stack(out, 1).to(q.dtype), torch.stack(lse, -1)


def test_exact_rows_leak_nothing():
    found = sagebwd.leaks(rows_alone, decode=True, key_heads=1, **SMALL)
    assert not found and found.repeats
    assert {c.cut for c in found.changes} >= {1, 2, 15, 17, 16, 64}
    assert "No later token changed a bit" in str(found)
    assert found.worst("NaN in v").relative == 0 and found.worst("NaN in v").rows > 0


def test_a_module_of_fixed_shape_gets_no_other_head_dim():
    def fixed(q, k, v):
        assert q.shape[2:] == (2, 16) and k.shape[2:] == v.shape[2:] == (1, 16)
        return rows_alone(q, k, v)

    assert not sagebwd.leaks(fixed, key_heads=1, **SMALL)


def test_one_key_too_many_is_found():
    found = sagebwd.leaks(lambda q, k, v: rows_alone(q, k, v, ahead=1)[0], **SMALL)
    assert found
    # The last row before the cut, in every head, and none else.
    alone = [c for c in found.changes if c.case == "other values of v"]
    assert all(c.changed == SMALL["heads"] for c in alone)
    assert math.isinf(found.worst("NaN in v").relative) and "NaN or Inf" in str(found)


def test_a_leak_in_the_log_sum_exp_is_found():
    def shifted(q, k, v):
        out, lse = rows_alone(q, k, v)
        return out, lse + 1e-9 * k.double().nan_to_num().sum()

    found = sagebwd.leaks(shifted, **SMALL)
    assert found.worst("other values of k").changed and not found.worst("other values of v").changed


def test_other_queries_are_later_tokens_too():
    def mean_query(q, k, v):
        return rows_alone(q - q.nan_to_num().mean(1, keepdim=True), k, v)

    assert sagebwd.leaks(mean_query, **SMALL).worst("other values of q").changed


def test_decoding_that_aligns_otherwise_is_found():
    def top_left(q, k, v):
        return rows_alone(q, k[:, : q.shape[1]], v[:, : q.shape[1]])

    assert not sagebwd.leaks(top_left, **SMALL)
    found = sagebwd.leaks(top_left, decode=True, **SMALL)
    assert found.worst("decode: the last queries alone").relative > 0.1


def test_results_that_scatter_are_said():
    def noisy(q, k, v):
        return rows_alone(q, k, v)[0] + torch.rand_like(q)

    found = sagebwd.leaks(noisy, **SMALL)
    assert not found.repeats and "different bits" in str(found)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_paper_leaks(layout):
    """What docs/causality.md says of it: its mean of K and its scales see later tokens."""
    found = sagebwd.leaks(layout=layout, seed=3, recipe="paper")
    assert found.repeats
    assert 0.003 < found.worst("other values").relative < 0.1
    assert found.worst("20 times as large").relative > found.worst("other values").relative
    # A mask that sees later keys would show their values, not a rounding.
    assert found.worst("prefix: those tokens are not there").relative < 0.1


def one_scale_of_v(q, k, v):
    """8 bit, with a scale that all tokens of a head share."""
    scale = v.abs().amax((1, 3), keepdim=True) / 127
    return rows_alone(q, k, (v / scale).round() * scale)


PUBLISHED = ("TransformerEngine#3248: 2^-20, then 1", "TransformerEngine#3248: 2^-10, then 1024")


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_cases_are_the_published_ones(case):
    found = sagebwd.leaks(one_scale_of_v, tokens=2)
    assert found.worst(case).changed  # O[7] is rounded to zero
    for fn in (rows_alone, None):  # None: the default recipe
        assert not sagebwd.leaks(fn, tokens=2).worst(case).changed


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_of_pytorch_in_16_bit(dtype):
    """Its rounding may depend on how many tokens there are, and what it hides may be multiplied by
    zero, which gives NaN. Nothing else shows."""
    attend = torch.nn.functional.scaled_dot_product_attention
    found = sagebwd.leaks(lambda *t: attend(*t, is_causal=True), layout="bhsd", dtype=dtype, seed=1)
    seen = {c.case for c in found.changes if c.changed}
    assert seen <= {"prefix: those tokens are not there", "NaN in v", "Inf in v"}, found


def test_arguments():
    with pytest.raises(ValueError, match="output like q, .*got list"):
        sagebwd.leaks(lambda q, k, v: [[0]], **SMALL)
    with pytest.raises(ValueError, match=r"output like q, \[1, 40, 2, 16\]"):
        sagebwd.leaks(lambda q, k, v: q.transpose(1, 2), **SMALL)
    with pytest.raises(ValueError, match="layout"):
        sagebwd.leaks(layout="bsdh")
    with pytest.raises(ValueError, match="tokens"):
        sagebwd.leaks(tokens=1)
    with pytest.raises(ValueError, match="expected a case of"):
        leakage.Leaks((), True).worst("none")
    state = torch.random.get_rng_state()
    sagebwd.leaks(rows_alone, **SMALL)
    assert torch.equal(state, torch.random.get_rng_state())
