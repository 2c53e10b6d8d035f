# SPDX-License-Identifier: Apache-2.0
"""Masks given as tensors: each must either be translated exactly or refused.

The matmuls run in floating point here, so that a single wrong pair of tokens shows.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import sagebwd
from reference import exact_grads, qkv, visible
from sagebwd import masks
from sagebwd.integrations import torch_sdpa
from sagebwd.recipe import MATMULS

FLOAT = sagebwd.Recipe(high_precision=tuple(MATMULS))
# Numbers have a deviation of about 1. Tensor cores add a little: they take FP32 in two parts.
GATE = 1e-5 if os.environ.get("SAGEBWD_TEST_DEVICE", "cpu") == "cpu" else 1e-4


class Random:
    """Random masks of each kind, bool [b or 1, s or 1, sk or 1]."""

    def __init__(self, seed):
        self.random = torch.Generator("cpu").manual_seed(seed)
        self.b = self.pick(1, 2, 3)
        self.s, self.sk = self.pick(1, 3, 7, 40), self.pick(1, 3, 12, 30)

    def pick(self, *choices):
        return choices[int(torch.randint(len(choices), (), generator=self.random, device="cpu"))]

    def below(self, high, *shape):
        numbers = torch.randint(high, shape, generator=self.random, device="cpu")
        return numbers.to(torch.get_default_device())

    def flags(self, share, *shape):
        numbers = torch.rand(shape, generator=self.random, device="cpu")
        return numbers.to(torch.get_default_device()) < share

    # --- kinds that are always read ---------------------------------------------------------------

    def everything(self):
        return torch.ones(1, 1, 1, dtype=torch.bool)

    def right_padding(self):
        return (torch.arange(self.sk) <= self.below(self.sk, self.b, 1))[:, None]

    def left_padding(self):
        return self.right_padding().flip(2)

    def any_keys(self):
        return self.flags(0.7, self.b, 1, self.sk)

    def any_queries(self):
        return self.flags(0.7, self.b, self.s, 1)

    def pairs(self):
        return self.any_queries() & self.any_keys()

    def causal(self):
        return visible(self.s, self.sk, True, align=self._align())[None]

    def causal_padded(self):
        if self.pick(True, False):
            return visible(self.s, self.sk, True, align="top_left") & self.right_padding()
        return visible(self.s, self.sk, True) & self.left_padding()

    def window(self):
        return visible(self.s, self.sk, False, self._sides(), self._align())[None]

    def documents(self):
        """Queries and keys in four pieces each, some of them maybe empty."""
        b = self.pick(1, self.b)
        ids = [self.below(4, b, n).sort(1).values for n in (self.s, self.sk)]
        return ids[0][:, :, None] == ids[1][:, None]

    def window_in_documents(self):
        """As packing makes them: as many keys as queries."""
        self.sk = self.s
        mask = torch.zeros(self.b, self.s, self.s, dtype=torch.bool)
        sides = self._sides()
        for row in mask:
            at = 0
            while at < self.s:
                n = min(self.s - at, 1 + self.below(self.s, 1).item())
                row[at : at + n, at : at + n] = visible(n, n, False, sides)
                at += n
        return mask

    def scattered_documents(self):
        b = self.pick(1, self.b)
        ids = [self.below(4, b, n) for n in (self.s, self.sk)]
        return ids[0][:, :, None] == ids[1][:, None]

    def shared_keys(self):
        """Queries of four kinds, each with any keys."""
        kinds = self.flags(0.6, 4, self.sk)
        return kinds[self.below(4, self.pick(1, self.b), self.s)]

    KINDS = (
        "everything right_padding left_padding any_keys any_queries pairs causal causal_padded "
        "window documents window_in_documents scattered_documents shared_keys"
    ).split()

    # --- the rest ---------------------------------------------------------------------------------

    def arbitrary(self):
        return self.flags(self.pick(0.2, 0.5, 0.9), self.b, self.s, self.sk)

    def mixture(self):
        self.sk = self.pick(self.s, self.sk)
        kinds = [k for k in self.KINDS if k != "window_in_documents" or self.s == self.sk]
        first, second = (getattr(self, self.pick(*kinds))() for _ in range(2))
        return first & second

    def _align(self):
        return self.pick("top_left", "bottom_right")

    def _sides(self):
        return self.pick(-1, 0, 2, 5), self.pick(-1, 0, 1, 4)

    # --- forms ------------------------------------------------------------------------------------

    def form(self, mask, heads):
        """The mask as a tensor that a caller might give, and the same one in full."""
        mask = mask[:, None]
        full = mask.expand(self.b, heads, self.s, self.sk)
        hidden = self.pick(None, -torch.inf, -1e4, torch.finfo(torch.float16).min)
        if hidden is not None and (hidden == -torch.inf or full.any(-1).all()):
            dtype = self.pick(torch.float32, torch.float16, torch.bfloat16)
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)
        how = self.pick("as it is", "expanded", "copied", "lower rank")
        if how == "expanded":
            mask = mask.expand(full.shape)
        elif how == "copied":
            mask = mask.expand(full.shape).contiguous()
        while how == "lower rank" and mask.dim() > 1 and mask.shape[0] == 1:
            mask = mask[0]
        return mask, full


def through_function(q, k, v, mask):
    return masks.attention_with_mask(q, k, v, mask, recipe=FLOAT)


def through_hook(q, k, v, mask):
    with torch_sdpa.enabled(recipe=FLOAT) as seen:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert seen.calls == 1
    return (out,)


def compare(random, mask):
    """Whether the mask was read. Asserts that then the results are right."""
    heads = random.pick(1, 3)
    q, k, v, dout = qkv(b=random.b, h=heads, s=random.s, sk=random.sk, d=16)
    form, full = random.form(mask, heads)
    dlse = torch.randn(dout.shape[:3])
    call = random.pick(through_function, through_hook)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    try:
        results = call(*leaves, form)
    except NotImplementedError as error:
        assert "attn_mask of shape" in str(error) and "leave other masks to" in str(error)
        return False
    want = exact_grads(q, k, v, dout, full, dlse=dlse if len(results) == 2 else None)
    grads = torch.autograd.grad(results, leaves, (dout, dlse)[: len(results)])
    for name, a, b in zip(("out", "dq", "dk", "dv"), (results[0], *grads), (want[0], *want[2:])):
        # Not relative: with one key a row, dq and dk are 0 but for rounding.
        torch.testing.assert_close(a.double(), b, atol=GATE, rtol=0, msg=f"{name} of {form}")
    if len(results) == 2:
        seen = full.any(-1)
        assert (results[1][~seen] == -torch.inf).all() and (results[0][~seen] == 0).all()
        torch.testing.assert_close(results[1][seen].double(), want[1][seen], atol=GATE, rtol=0)
    return True


@pytest.mark.parametrize("kind", Random.KINDS)
def test_masks_of_each_kind_are_read(kind):
    for seed in range(12):
        random = Random(seed)
        assert compare(random, getattr(random, kind)()), (kind, seed)


@pytest.mark.parametrize("kind", ["mixture", "arbitrary"])
def test_other_masks_are_read_or_refused(kind):
    read = []
    for seed in range(120):
        random = Random(seed)
        read.append(compare(random, getattr(random, kind)()))
    assert 20 < sum(read) < 120, "the test sees both"


def test_repeats_are_not_written_out():
    """A mask that expand() made large is read as the small one it is."""
    largest = 0

    class Storage(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    q = torch.empty(2, 4, 512, 16)
    mask = (torch.arange(512) < torch.tensor([[512], [100]]))[:, None, None]
    for form in (mask, mask.expand(2, 4, 512, 512), mask[1, 0, 0]):
        with Storage():
            documents = masks.read(form, q, q)
        assert 0 < largest < 512 * 512
    assert documents.cu_k.tolist() == [0, 100, 200]


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)], ids=str)
def test_empty_batches(shape):
    b, h, s, sk = shape
    q, k = torch.randn(b, h, s, 16, requires_grad=True), torch.randn(b, h, sk, 16)
    for mask in (torch.ones(shape, dtype=torch.bool), torch.zeros(1, 1, s, 1)):
        out, lse = masks.attention_with_mask(q, k, k, mask)
        out.sum().backward()
        assert (out == 0).all() and (lse == -torch.inf).all() and (q.grad == 0).all()


def test_rows_of_finite_numbers():
    """Where all keys of a query have one finite number, softmax sees all of them."""
    q = torch.randn(1, 1, 4, 16)
    mask = torch.zeros(4, 4)
    mask[2] = -1e4
    for form in (mask, mask.clone().index_fill(1, torch.tensor([0, 1]), -torch.inf)):
        with pytest.raises(NotImplementedError, match="finite number.*; use booleans or -inf"):
            masks.read(form, q, q)
    mask[2] = -torch.inf  # another row may hide by finite numbers
    mask[1, 2:] = -1e4
    assert masks.read(mask, q, q).where_q.tolist() == [1, 0, 3]


def test_refusals_name_what_came():
    q = torch.randn(2, 2, 8, 16)
    lower = visible(8, 8, True)
    learned = torch.zeros(8, 8, requires_grad=True)
    for mask, error, words in [
        (learned, NotImplementedError, r"attn_mask of shape \(8, 8\).*learned bias"),
        (torch.full((8, 8), torch.nan), NotImplementedError, "bias"),
        (lower.float() - 1, NotImplementedError, "bias"),
        (lower.long(), TypeError, "int64"),
        (lower[None, None, None], ValueError, "broadcasts to"),
    ]:
        with pytest.raises(error, match=words):
            masks.read(mask, q, q)
    with pytest.raises(ValueError, match="attn_mask, is_causal"):
        masks.read(lower, q, q, is_causal=True)
