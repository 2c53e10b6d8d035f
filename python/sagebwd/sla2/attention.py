# SPDX-License-Identifier: Apache-2.0
"""Sparse-linear attention as a module."""

import torch
from torch import nn

from .. import arguments
from .._ops import sla2 as operators
from .._ops.call import is_distributed
from ..attention import attention, attention_options, check_dense, is_deterministic, readable
from ..linear import linear_attention
from ..recipe import as_recipe
from .alpha import make_alpha
from .causal import CausalRouter
from .mix import mix
from .router import Router


class Attention(nn.Module):
    """q, k, v → out: INT8 attention over the key blocks that the router chooses, and a linear
    branch over all others, mixed by a learned α:  out = α · sparse + (1 - α) · linear.

    heads, head_dim, kv_heads
        Those of q; kv_heads (of k and v) if they are fewer.
    keep
        The share of key blocks that a block of queries sees, at least one block. With 1, and
        wherever every block is chosen, the result is ``sagebwd.attention(q, k, v)``, bit for bit,
        and α counts as 1. An attribute: it may be changed at any time.
    alpha
        ``"block"``: one number per head and query block, from a table of ``rows`` places (the query
        blocks of the usual length; others interpolate). ``"head"``: one per head. ``"mass"``: one
        for each query, from the norms of both branches and one learned number per head.
    always
        Key blocks that every block of queries sees, for example those of text or of given frames.
        A sequence too short to have one does without it.
    order
        Says in which order tokens come. It is kept in the ``state_dict`` together with the block
        sizes, and a module of another order or other block sizes refuses to load it.
    causal
        A query sees its own and earlier tokens, as in a language model. The key blocks that the
        diagonal touches are always seen; ``keep`` is the share of those before. Neither router nor
        linear branch looks at later tokens. Needs as many queries as keys (no cache).
    recipe, backward, deterministic
        As in :func:`sagebwd.attention`.

    The parameters are those of ``alpha`` (trained with the model; ten times its learning rate is a
    good start) and ``router.wq``, ``router.wk`` (trained by :func:`sagebwd.sla2.fit` and then left
    as they are).
    """

    def __init__(
        self,
        heads,
        head_dim,
        *,
        keep=0.05,
        alpha="block",
        rows=64,
        kv_heads=None,
        block_q=128,
        block_k=64,
        always=(),
        order=(1, 1, 1),
        causal=False,
        recipe="vectorwise",
        backward="int8",
        deterministic=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.heads = arguments.integer("heads", heads, 1, 2**20, "a number of heads")
        self.head_dim = arguments.integer("head_dim", head_dim, 8, 256, "a multiple of 8 to 256")
        if self.head_dim % 8:
            raise ValueError(f"head_dim: expected a multiple of 8, got {head_dim}")
        self.kv_heads = self.heads
        if kv_heads is not None:
            self.kv_heads = arguments.integer("kv_heads", kv_heads, 1, heads, f"1 to {heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of {heads} heads, got {kv_heads}")
        rows = arguments.integer("rows", rows, 1, 2**20, "a number of query blocks")
        for name, size in (("block_q", block_q), ("block_k", block_k)):
            if arguments.integer(name, size, 64, 2**30, "a multiple of 64") % 64:
                raise ValueError(f"{name}: expected a multiple of 64, got {size}")
        for block in always:
            arguments.integer("always", block, 0, 2**30, "numbers of key blocks")
        if backward not in ("int8", "bf16"):
            raise ValueError(f"backward: expected 'int8' or 'bf16', got {backward!r}")
        place = {"device": device, "dtype": dtype}
        self.keep = keep
        self.options = dict(  # what else convert needs to make this module again
            alpha=alpha,
            rows=rows,
            block_q=block_q,
            block_k=block_k,
            always=list(always),
            backward=backward,
            deterministic=deterministic,
        )
        self.causal = arguments.flag("causal", causal)
        router = CausalRouter if self.causal else Router
        self.router = router(heads, head_dim, block_q, block_k, always, **place)
        self.alpha = make_alpha(alpha, heads, head_dim, rows, **place)
        self.arrangement = [block_q, block_k, *order, *[1] * self.causal]
        self.register_buffer("layout", torch.tensor(self.arrangement, device=device))
        self.call = dict(
            causal=self.causal,
            recipe=as_recipe(recipe),
            backward=backward,
            deterministic=deterministic,
        )

    @property
    def keep(self):
        return self._keep

    @keep.setter
    def keep(self, keep):
        if isinstance(keep, (bool, str)) or not 0 < keep <= 1:
            raise ValueError(f"keep: expected a share above 0 and up to 1, got {keep!r}")
        self._keep = keep

    def forward(self, q, k, v):
        """q [b, s, h, d]; k, v [b, sk, hk, d]."""
        self._check(q, k)
        q, k, v = cast(q, k, v)
        if q.device.type == "meta":
            return self._forward(q, k, v)
        # What is float32 from here on stays so.
        with torch.autocast(q.device.type, enabled=False):
            return self._forward(q, k, v)

    def _forward(self, q, k, v):
        found = self.router.route(q, k, self.keep)
        if found is None:
            return attention(q, k, v, **self.call)
        return self.over(q, k, v, *found)

    def over(self, q, k, v, lists, excluded):
        """The output with what the router chose. Where a kernel mixes, the branches are one
        operator. α of norms is made between them."""
        if operators.mixes(q) and not self.alpha.uses_norms and not is_distributed(q):
            return self.together(q, k, v, lists, excluded)
        return self.apart(q, k, v, lists, excluded)

    def together(self, q, k, v, lists, excluded):
        """Both branches and their mix as one operator. α comes from a table."""
        check_dense(q, k, v, "bshd")
        alpha, _, block = self.share(q, k, None, None)
        recipe = as_recipe(self.call["recipe"])
        sparse = attention_options(
            causal=self.causal, recipe=recipe, backward=self.call["backward"]
        ).signed()
        options = operators.Options(
            causal=self.causal,
            recipe=sparse.recipe,
            seed=sparse.seed,
            list_index=lists.index,
            list_count=lists.count,
            lead=lists.lead,
            excluded_index=excluded.index,
            excluded_count=excluded.count,
            block_q=lists.block_q,
            block_k=lists.block_k,
            mean_free_keys=not self.causal,
            alpha_block=block,
            deterministic=is_deterministic(self.call["deterministic"]),
        )
        heads_first = (x.transpose(1, 2) for x in readable(q, k, v))
        return operators.attend(*heads_first, alpha, options, recipe.save_codes).transpose(1, 2)

    def apart(self, q, k, v, lists, excluded):
        """The branches one after the other, and then their mix."""
        sparse, lse = attention(q, k, v, blocks=lists, return_lse=True, **self.call)
        linear, norm = self.linear(q, k, v, excluded)
        return mix(sparse, linear, *self.share(q, k, lse, norm))

    def linear(self, q, k, v, excluded):
        """(output, norm) of the linear branch. A mean of all keys would show later ones."""
        return linear_attention(
            q, k, v, exclude=excluded, mean_free_keys=not self.causal, return_norm=True
        )

    def share(self, q, k, lse, norm):
        """What :func:`mix` wants to know: (α, norm, queries that share an α)."""
        if self.alpha.uses_norms:
            return self.alpha(self._centred(lse, q, k), norm), norm, 1
        block, tokens = self.router.block_q, q.shape[1]
        if self.alpha.places == 1:
            block = -(-tokens // 64) * 64  # one for the head
        return self.alpha(-(-tokens // block))[None], norm, block

    def _centred(self, lse, q, k):
        """The log-sum-exp of q and the keys as the linear branch sees them."""
        if self.causal:
            return lse
        mean = k.mean(1, dtype=torch.float32).repeat_interleave(self.heads // self.kv_heads, 1)
        return lse - torch.einsum("bshd,bhd->bhs", q.float(), mean) / self.head_dim**0.5

    def _check(self, q, k):
        for name, x, heads in (("q", q, self.heads), ("k", k, self.kv_heads)):
            if not isinstance(x, torch.Tensor) or x.dim() != 4:
                raise ValueError(f"{name}: expected a tensor [batch, tokens, heads, head dim]")
            if x.shape[2:] != (heads, self.head_dim):
                raise ValueError(
                    f"{name}: expected {heads} heads of {self.head_dim} channels, got shape "
                    f"{tuple(x.shape)}"
                )
        if self.causal and self.keep < 1 and q.shape[1] != k.shape[1]:
            raise NotImplementedError(
                f"causal: expected as many queries as keys, got {q.shape[1]} and {k.shape[1]}: the "
                "router needs the queries of the block before, which a cache of keys does not "
                "have; give the whole sequence (use_cache=False), or set keep = 1, which is full "
                "attention"
            )

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, extra, errors):
        saved = state_dict.get(prefix + "layout")
        if saved is not None and saved.tolist() != self.arrangement:
            errors.append(
                f"{prefix}layout: expected [block_q, block_k, box, 1 if causal] = "
                f"{self.arrangement}, the state has {saved.tolist()}; make the module with its "
                "block sizes and order"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, extra, errors)

    def extra_repr(self):
        causal = ", causal" if self.causal else ""
        return f"heads={self.heads}, head_dim={self.head_dim}, keep={self.keep}{causal}"


def cast(q, k, v):
    """q, k and v in autocast's dtype, if there is one."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, k, v
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
