# SPDX-License-Identifier: Apache-2.0
"""What docs/causality.md promises of the default recipe: no later token changes a bit of an earlier
output, and a token that is decoded with a cache has the bits that the whole sequence gives it."""

import pytest
import torch

import sagebwd
from sagebwd import flash_attn_with_kvcache
from sagebwd._ops import attention as ops


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(layout="bhsd", dtype=torch.float16, head_dim=128, key_heads=1),
        dict(dtype=torch.float32, head_dim=40),
        dict(tokens=700, heads=1),
    ],
    ids=str,
)
def test_later_tokens_change_no_bit(options):
    """Whatever they are: NaN and Inf too, and also where they are missing."""
    found = sagebwd.leaks(decode=True, seed=4, **options)
    assert not found and found.repeats, found


@pytest.mark.parametrize(
    "options",
    [
        dict(recipe="vectorwise smooth_k=off"),
        dict(recipe="vectorwise rotate=off tile=128x64"),
        dict(recipe="vectorwise lift=S,S'"),
        dict(backward="bf16"),
        dict(window_size=(100, 0)),
        dict(softcap=20.0),
        dict(sinks=torch.arange(2.0)),
    ],
    ids=str,
)
def test_later_tokens_change_no_bit_with(options):
    attend = lambda *t: sagebwd.attention(*t, causal=True, return_lse=True, **options)
    found = sagebwd.leaks(attend, decode=True, seed=5)
    assert not found and found.repeats, found


def test_dither_is_of_the_place_of_a_query_in_its_call():
    """Later tokens change nothing, but the last queries alone get other random numbers."""
    recipe = sagebwd.Recipe(rounding="dither", seed=1)
    found = sagebwd.leaks(recipe=recipe, decode=True, seed=5)
    assert {c.case for c in found.changes if c.changed} == {"decode: the last queries alone"}


# --- the same bits in every way of asking ---------------------------------------------------------


def whole(q, k, v, recipe="vectorwise", **options):
    return sagebwd.attention(q, k, v, causal=True, recipe=recipe, return_lse=True, **options)


def make(b=2, n=300, h=4, hk=2, d=64, dtype=torch.float32):
    """q, k, v in which later tokens are larger, so that whatever is shared would show."""
    growth = torch.logspace(0, 2, n)[:, None, None]
    q, k, v = torch.randn(b, n, h, d), torch.randn(b, n, hk, d), torch.randn(b, n, hk, d)
    return q.to(dtype), (growth * k).to(dtype), (growth * v + 3).to(dtype)


def decode(q, k, v, start, step, recipe="vectorwise", **options):
    """The output and the log-sum-exp of tokens from ``start`` on, ``step`` at a time, with a cache
    that has room for more."""
    b, n = q.shape[:2]
    caches = [torch.full((b, n + 50, *t.shape[2:]), torch.nan, dtype=t.dtype) for t in (k, v)]
    for cache, t in zip(caches, (k, v)):
        cache[:, :start] = t[:, :start]
    found = []
    for i in range(start, n, step):
        new = slice(i, i + step)
        found.append(
            flash_attn_with_kvcache(
                q[:, new], *caches, k[:, new], v[:, new], cache_seqlens=i, causal=True,
                return_softmax_lse=True, recipe=recipe, **options,
            )
        )  # fmt: skip
    out, lse = zip(*found)
    return torch.cat(out, 1), torch.cat(lse, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("step", [1, 37])
def test_decoding_with_a_cache(step, dtype):
    q, k, v = make(dtype=dtype)
    out, lse = whole(q, k, v)
    for start in (100, 128, 257):
        got, got_lse = decode(q, k, v, start, step)
        assert torch.equal(got, out[:, start:]) and torch.equal(got_lse, lse[:, :, start:])


@pytest.mark.parametrize(
    "options",
    [dict(window_size=(70, 0)), dict(softcap=10.0), dict(s_aux=torch.arange(4.0))],
    ids=["window", "cap", "sinks"],
)
def test_decoding_with_windows_caps_and_sinks(options):
    q, k, v = make(n=270)
    same = {"sinks" if name == "s_aux" else name: value for name, value in options.items()}
    out, lse = whole(q, k, v, **same)
    got, got_lse = decode(q, k, v, 200, 1, **options)
    assert torch.equal(got, out[:, 200:]) and torch.equal(got_lse, lse[:, :, 200:])


def test_paper_decodes_other_bits():
    q, k, v = make()
    out, _ = whole(q, k, v, "paper")
    assert not torch.equal(decode(q, k, v, 257, 1, "paper")[0], out[:, 257:])


def test_rows_of_different_lengths():
    """Caches that begin and end where their row says: each row is as if it were alone."""
    q, k, v = make(b=3)
    starts, ends = torch.tensor([0, 5, 64]), torch.tensor([300, 133, 193])
    got = flash_attn_with_kvcache(
        q[:, :1], k, v, cache_seqlens=ends.int(), cache_leftpad=starts.int(), causal=True
    )
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        seen = slice(start, end)
        alone, _ = whole(q[row : row + 1, :1], k[row : row + 1, seen], v[row : row + 1, seen])
        assert torch.equal(got[row], alone[0])


def test_documents_and_batches():
    """A document is the same alone and in a pack, a batch entry alone and with others."""
    q, k, v = make(b=2, n=400)
    out, lse = whole(q, k, v)
    for i in (0, 1):
        alone = whole(q[i : i + 1], k[i : i + 1], v[i : i + 1])
        assert torch.equal(alone[0], out[i : i + 1]) and torch.equal(alone[1], lse[i : i + 1])
    cu = torch.tensor([0, 7, 7, 140, 400], dtype=torch.int32)
    packed = sagebwd.attention_varlen(q[0], k[0], v[0], cu, cu, causal=True)
    for begin, end in zip(cu.tolist(), cu.tolist()[1:]):
        if begin < end:
            one = slice(begin, end)
            alone, _ = whole(q[:1, one], k[:1, one], v[:1, one])
            assert torch.equal(packed[one], alone[0])


class OneTokenAtATime(torch.nn.Linear):
    """A matmul may round otherwise if it has other rows; attention is what is compared here."""

    def forward(self, x):
        rows = [torch.nn.functional.linear(row, self.weight, self.bias) for row in x.flatten(0, -2)]
        return torch.stack(rows).unflatten(0, x.shape[:-1])


@pytest.mark.slow
def test_generation_with_transformers():
    transformers = pytest.importorskip("transformers")
    from sagebwd.integrations import transformers as hook

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.to(torch.get_default_device())
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = OneTokenAtATime
    tokens = torch.randint(64, (1, 150))

    def logits(name):
        """All tokens at once, and from the 120th on one after the other."""
        model.set_attn_implementation(hook.register(name, recipe=name))
        with torch.no_grad():
            at_once = model(tokens).logits
            found = [model(tokens[:, :120], use_cache=True)]
            for i in range(120, 150):
                cache = found[-1].past_key_values
                found.append(model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True))
        return at_once, torch.cat([f.logits for f in found], 1)

    try:
        assert torch.equal(*logits("vectorwise"))
        assert not torch.equal(*logits("paper")), "it rounds otherwise"
    finally:
        for name in ("vectorwise", "paper"):
            hook.unregister(name)


def test_one_implementation_takes_both():
    """The promise is of one implementation: a step of decoding has that of the whole sequence."""
    q, k, v = (t.transpose(1, 2) for t in make())
    options = ops.Options(causal=True)
    chosen = [
        next(name for name, state, _ in ops.explain(part, k, v, options) if state == "chosen")
        for part in (q, q[:, :, -1:])
    ]
    assert chosen[0] == chosen[1]
