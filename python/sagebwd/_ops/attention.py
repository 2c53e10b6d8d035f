# SPDX-License-Identifier: Apache-2.0
"""The operators of attention: how they are called, and autograd.

``sagebwd::fwd`` gives (out, lse, max_logit, codes); ``sagebwd::bwd`` gives (dq, dk, dv) from q, k,
v, out, lse and the gradients of out and lse. With ``save_codes`` the codes hold what the forward
made of q, k and v, a byte per channel, and autograd keeps them instead of q, k and v. The backward
gives the same bits either way. Tensors are [b, h, n, d], or [t, h, d] with document offsets; v and
out may have another head dim than q and k.
"""

from operator import itemgetter
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from .call import call, call_kernel, is_distributed, refuse, refuse_transforms

_ops = torch.ops.sagebwd
FORWARD, BACKWARD = _ops.fwd.default, _ops.bwd.default
#: Eager calls with autograd in C++; None where it was not compiled for this PyTorch.
_attend = _ops.attend.default if hasattr(_ops, "attend") else None


class Options(NamedTuple):
    """The operator arguments that follow the tensors, in order."""

    cu_seqlens_q: Optional[Tensor] = None
    cu_seqlens_k: Optional[Tensor] = None
    max_seqlen_q: int = -1  # -1: not told
    max_seqlen_k: int = -1
    softmax_scale: Optional[float] = None
    causal: bool = False
    top_left: bool = False
    window_left: int = -1
    window_right: int = -1
    recipe: str = "vectorwise"
    seed: int = 0
    list_index: Optional[Tensor] = None  # block lists: see block_lists.py
    list_count: Optional[Tensor] = None
    block_q: int = 128
    block_k: int = 64
    lead: int = 1
    softcap: float = 0.0  # 0: none

    def signed(self):
        """The options as the operators take them: the 64 bits of the seed as a signed integer."""
        return self if self.seed < 2**63 else self._replace(seed=self.seed - 2**64)


#: Where the options are that are tensors. Autograd has to keep them by other means than the rest.
_TENSORS = tuple(
    map(Options._fields.index, ("cu_seqlens_q", "cu_seqlens_k", "list_index", "list_count"))
)

# The options as the operator `attend` takes them: tensors, and integers and flags, each in order.
_tensors = itemgetter(*_TENSORS)
_numbers = itemgetter(
    *(
        i
        for i, name in enumerate(Options._fields)
        if i not in _TENSORS and name not in ("softmax_scale", "recipe", "softcap")
    )
)


def attend(
    q, k, v, options, *, deterministic, return_lse, return_max_logit, save_codes, tokens_first
):
    """What :func:`forward` gives, by the shortest way; None if the call cannot take that. Nothing
    has to be checked before: then it takes none but calls of q, k and v that fit together, and that
    autocast and the kernels leave as they are. Documents and lists have to be checked."""
    if _attend is None or not _is_eager(q, k, v):
        return None
    refuse_transforms()
    options = options.signed()
    results = _attend(
        q,
        k,
        v,
        options.softmax_scale,
        options.recipe,
        (
            *_numbers(options),
            deterministic,
            return_max_logit,
            save_codes and codes_suffice(options.recipe),
            return_lse,
            tokens_first,
        ),
        *(() if options.cu_seqlens_q is None and options.list_index is None else _tensors(options)),
        **({"softcap": options.softcap} if options.softcap else {}),
    )
    return None if results[0] is None else results


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_eager(*tensors):
    """Whether nobody but autograd watches a call: no compiler, no mode that looks at functions (it
    has to see the operator's own results; that of a default device does not) or at operators, and
    no class of tensors with ideas of its own."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() > 0:
        return False
    for t in tensors:
        if type(t) not in _PLAIN:
            return False
    for i in range(torch._C._len_torch_function_stack()):
        if type(torch._C._get_function_stack_at(i)) is not DeviceContext:
            return False
    return True


def forward(
    q,
    k,
    v,
    options,
    *,
    deterministic=False,
    return_lse=True,
    return_max_logit=False,
    save_codes=True,
    tokens_first=False,
):
    """(out, lse, max_logit); differentiable in q, k, v through out and lse. What is not asked for
    may be None. ``save_codes``: where gradients are wanted and codes suffice, keep codes for the
    backward instead of q, k and v. ``tokens_first``: q, k, v and out are [b, n, h, d]."""
    results = attend(
        q,
        k,
        v,
        options,
        deterministic=deterministic,
        return_lse=return_lse,
        return_max_logit=return_max_logit,
        save_codes=save_codes,
        tokens_first=tokens_first,
    )
    if results is not None:
        return results
    if not torch.compiler.is_compiling():
        refuse_transforms()
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    save = wanted and save_codes and not is_distributed(q) and codes_suffice(options.recipe)
    rest = (*options.signed(), deterministic, return_max_logit, save)
    q, k, v = swapped(tokens_first, q, k, v)
    if not _is_eager(q, k, v):
        out, *others = call(FORWARD, q, k, v, *rest)[:3]
    elif not wanted:
        out, *others = call_kernel(FORWARD, q, k, v, *rest)[:3]
    else:
        # Every result that autograd follows costs a microsecond.
        count = 3 if return_max_logit else 2 if return_lse else 1
        out, *others = *_apply(q, k, v, rest, count), *(None,) * (3 - count)
    return *swapped(tokens_first, out), *others


def swapped(tokens_first, *tensors):
    """From [b, n, h, d] to [b, h, n, d] or back, if tokens come first."""
    return tuple(t.transpose(1, 2) for t in tensors) if tokens_first else tensors


_suffice = {}  # what codes_suffice was told


def codes_suffice(recipe):
    """Whether codes are all that the backward of a recipe needs of q, k and v. With malformed
    recipes they do not, so that the call is what refuses those."""
    answer = _suffice.get(recipe)
    if answer is None:
        answer = _suffice[recipe] = _ops.codes_suffice(recipe)
    return answer


# Compilers take the answer as a constant. torch.compiler.assume_constant_result sets this as well,
# and imports the compiler for it.
codes_suffice._dynamo_marked_constant = True


def codes_bytes(q, k, v, cu_seqlens_q):
    """Size of the codes of a call, from shapes alone: sagebwd/codes.h has the layout."""
    h, hk, d, dv = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
    if cu_seqlens_q is None:
        queries, keys = q.shape[0] * q.shape[2], k.shape[0] * k.shape[2]
        blocks = k.shape[0] * ((k.shape[2] + 127) // 128)
    else:
        queries, keys = q.shape[0], k.shape[0]
        blocks = keys // 128 + cu_seqlens_q.shape[0] - 1
    parts = [h * queries * d, hk * keys * d, hk * keys * dv]
    parts += [4 * h * queries, 4 * hk * keys, 4 * hk * keys]  # scales
    parts += [hk * blocks * d, 4 * hk * blocks, hk * blocks * dv, 4 * hk * blocks]  # centres
    return sum((part + 15) // 16 * 16 for part in parts)


def backward(
    dout, q, k, v, out, lse, dlse, options, *, deterministic=False, partial_kv=False, codes=None
):
    """(dq, dk, dv). ``partial_kv``: k and v are part of the keys and lse is of all of them (a ring
    step). ``codes``: of the forward; only the shapes of q, k and v are then looked at."""
    switches = (deterministic, partial_kv, codes)
    return _backward(dout, q, k, v, out, lse, dlse, *options.signed(), *switches)


def _backward(*args):
    """(dq, dk, dv) of the operator's arguments."""
    # Where gradients are recorded, a double backward may follow, and the formula refuses it.
    if torch.is_grad_enabled() or not _is_eager(*args[:6]):
        return call(BACKWARD, *args)
    return call_kernel(BACKWARD, *args)


#: By dtype: see :func:`tuned_head_dim`. Asked once, because compilers cannot follow the question.
_TUNED = {
    dtype: _ops.tuned_head_dim(name)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32"))
}


def tuned_head_dim(q):
    """The largest head dim that tuned kernels serve for tensors like q, all of one head dim; 0
    where a call with values of another head dim is as fast as it is."""
    return _TUNED.get(q.dtype, 0) if q.device.type == "cuda" else 0


def explain(q, k, v, options, *, is_backward=False):
    """[(implementation, "chosen" | "able" | "no", tile sizes or the reason it declines)], best
    first."""
    text = call(_ops.explain.default, q, k, v, *options.signed(), is_backward)
    return [tuple(entry.split("\t")) for entry in _lines(text)]


def _lines(text):
    return [line for line in text.split("\n") if line]


# --- autograd -------------------------------------------------------------------------------------


# PyTorch keeps a formula per operator, which compiled graphs and tensors of other classes use. Its
# wrapper around the formula costs several times what the kernels of a small call cost. Plain eager
# calls therefore take the same two steps in C++ (bindings/torch/autograd.cpp) or, where that was
# not compiled for this PyTorch, in a Function of their own.


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rest, count):
        """The first ``count`` results; ``rest``: the operator's arguments after v."""
        output = call_kernel(FORWARD, q, k, v, *rest)
        _save(ctx, q, k, v, *rest, output)
        if count == 3:
            ctx.mark_non_differentiable(output[2])
        return output[:count]

    @staticmethod
    def backward(ctx, dout, dlse=None, _=None):
        return *_gradients(ctx, dout, dlse), None, None


# Function.apply without its care for torch.func, which forward() refuses.
_apply = super(torch.autograd.Function, _Attention).apply


def _setup_context(ctx, inputs, output):
    _save(ctx, *inputs, output)
    ctx.mark_non_differentiable(*output[2:])


def _fwd_backward(ctx, dout, dlse, *_):
    return (*_gradients(ctx, dout, dlse), *(None,) * (len(Options._fields) + 3))


def _save(ctx, q, k, v, *rest):
    """Keeps what the backward needs. The arguments are those of the operator, and its results."""
    *options, deterministic, _, save_codes, (out, lse, _, codes) = rest
    kept = (codes,) if save_codes else (q, k, v)
    ctx.save_for_backward(out, lse, *(options[i] for i in _TENSORS), *kept)
    for i in _TENSORS:
        options[i] = None
    ctx.options, ctx.deterministic = options, deterministic
    ctx.shapes = None
    if save_codes:
        # out has the shape and the strides of q, unless values have another head dim.
        one_head_dim = q.shape[-1] == v.shape[-1]
        ctx.shapes = [(t.shape, t.stride()) for t in ((k,) if one_head_dim else (q, k, v))]
    # An unused lse gives None for dlse instead of zeros, so that the backward knows that rows of dS
    # sum to zero.
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    """(dq, dk, dv) of a call that _save has seen."""
    if dout is None and dlse is None:
        return None, None, None
    out, lse, *kept = ctx.saved_tensors
    options = list(ctx.options)
    for i in _TENSORS:
        options[i] = kept.pop(0)
    if dout is None:
        dout = torch.zeros_like(out)
    if ctx.shapes is None:
        (q, k, v), codes = kept, None
    else:
        (codes,) = kept
        found = [_stand_in(out, *shape) for shape in ctx.shapes]
        q, k, v = found if len(found) == 3 else (out, *found, *found)
    return _backward(dout, q, k, v, out, lse, dlse, *options, ctx.deterministic, False, codes)


def _stand_in(like, shape, strides):
    """For q, k and v beside codes: only their shape is looked at, and the order of strides, which
    the gradients take over. There is one element per token and head."""
    return like.new_empty_strided(shape, [*_in_order(shape, strides, 1), 0])


def _in_order(shape, strides, size):
    """Strides of all dimensions but the last, which takes ``size`` elements: dense, in the order
    that they have in memory."""
    dense = [0] * (len(shape) - 1)
    for dim in sorted(range(len(shape) - 2, -1, -1), key=strides.__getitem__):
        dense[dim] = size
        size *= shape[dim]
    return dense


def empty_out(q, v):
    """The result of a call without its values: like q, with the head dim of v."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q)
    shape = (*q.shape[:-1], v.shape[-1])
    return q.new_empty_strided(shape, [*_in_order(shape, q.stride(), v.shape[-1]), 1])


torch.library.register_autograd("sagebwd::fwd", _fwd_backward, setup_context=_setup_context)
refuse(("fwd", "bwd"), backward="bwd")
