# SPDX-License-Identifier: Apache-2.0
"""Mistakes that users of other attentions make get an answer that names the right way."""

import inspect
import sys
import warnings
from pathlib import Path

import pytest
import torch

import sagebwd

front = sys.modules["sagebwd.attention"]  # the function of that name hides it
SMALL = torch.randn(1, 8, 2, 16)
OFFSETS = torch.tensor([0, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    "word, remedy",
    [
        ("is_causal", "use causal="),
        ("scale", "use softmax_scale="),
        ("dropout_p", "no dropout"),
        ("attn_mask", "use sagebwd.scaled_dot_product_attention"),
        ("return_softmax_lse", "use return_lse="),
        ("s_aux", "use sinks="),
        ("windw_size", "did you mean 'window_size'"),
    ],
)
def test_keywords_of_other_attentions(word, remedy):
    packed = SMALL[0]
    for call in (
        lambda: sagebwd.attention(SMALL, SMALL, SMALL, **{word: None}),
        lambda: sagebwd.attention_varlen(packed, packed, packed, OFFSETS, OFFSETS, **{word: None}),
        lambda: sagebwd.is_supported(SMALL, SMALL, SMALL, **{word: None}),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{word}'.*{remedy}"):
            call()


def test_a_keyword_nobody_has_gets_no_suggestion():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyzzy'$"):
        sagebwd.attention(SMALL, SMALL, SMALL, xyzzy=1)


def test_heads_in_the_place_of_tokens_are_doubted_once(monkeypatch):
    monkeypatch.setattr(front, "_warned", False)
    suspicious = torch.randn(1, 4, 300, 16)  # [b, h, s, d]
    with pytest.warns(UserWarning, match="layout='bhsd'"):
        sagebwd.attention(suspicious, suspicious, suspicious)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sagebwd.attention(suspicious, suspicious, suspicious)
        monkeypatch.setattr(front, "_warned", False)
        sagebwd.attention(suspicious, suspicious, suspicious, layout="bhsd")
        one = torch.randn(1, 300, 4, 16)
        sagebwd.attention(one, one, one)


def test_heads_that_do_not_divide_name_the_layout():
    q, k = torch.randn(1, 4, 2000, 16), torch.randn(1, 4, 1500, 16)
    with pytest.raises(ValueError, match="layout='bhsd'"):
        sagebwd.attention(q, k, k)


def test_offsets_have_the_names_of_the_arguments():
    q = SMALL[0].cpu()
    falling, fine = (
        torch.tensor(cu, dtype=torch.int32, device="cpu") for cu in ([0, 6, 4, 8], [0, 2, 4, 8])
    )
    with pytest.raises(ValueError, match="cu_seqlens_q") as caught:
        sagebwd.attention_varlen(q, q, q, falling, fine)
    assert "documents" not in str(caught.value)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        sagebwd.attention_varlen(q, q, q, fine, falling)


def test_a_double_backward_names_a_remedy():
    q = SMALL.clone().requires_grad_()
    (dq,) = torch.autograd.grad(sagebwd.attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="scaled_dot_product_attention"):
        dq.sum().backward()


def test_names_that_users_need():
    shown = dir(sagebwd)
    assert set(sagebwd.__all__) <= set(shown)
    assert not {"ops", "arguments", "call", "padding", "fakes"} & set(shown)
    assert all(hasattr(sagebwd, name) for name in shown)
    assert (Path(sagebwd.__file__).parent / "py.typed").exists()


def test_every_function_has_type_hints():
    for name in sagebwd.__all__:
        if inspect.isfunction(thing := getattr(sagebwd, name)):
            signature = inspect.signature(thing)
            given = [p.annotation for p in signature.parameters.values()]
            assert inspect.Signature.empty not in (signature.return_annotation, *given), name
