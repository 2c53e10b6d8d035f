# SPDX-License-Identifier: Apache-2.0
"""Every attention layer of a model on real text: what each kind of attention makes of the very q,
k, v and dO that the layer has there, against exact attention in float64."""

import math
from dataclasses import replace

import torch

from .._ops import attention as ops
from ..tools.diagnosis import FINE, USABLE, _exact, _run
from ..train.errors import BadInput
from .model import batch_and_loss

TENSORS = ("O", "dQ", "dK", "dV")


def capture(model, rows):
    """The layers of the model on sequences [n, tokens + 1], with q, k, v and dO rounded to
    bfloat16: all arms get the same tensors, and so does float64."""
    layers = _run(model, *batch_and_loss(rows))
    for i, layer in enumerate(layers):
        if layer.unsupported or layer.dout is None:
            why = layer.unsupported or "no gradient came back to it"
            raise BadInput(f"layer {i} cannot be compared: {why}")
    names = ("q", "k", "v", "dout")
    return [replace(la, **{n: getattr(la, n).bfloat16() for n in names}) for la in layers]


def kernels(layer, recipes):
    """{recipe: the kernels that serve such a layer here, with their tiles}"""
    found = {}
    for name, recipe in recipes.items():
        options = ops.Options(causal=layer.causal, top_left=layer.top_left, recipe=recipe.text())
        words = []
        for is_backward in (False, True):
            answers = ops.explain(layer.q, layer.k, layer.v, options, is_backward=is_backward)
            words += [f"{who} {tiles}" for who, state, tiles in answers if state == "chosen"]
        found[name] = ", ".join(words)
    return found


def measure(layers, arms):
    """Yields {"layer", "max_logit", "first_key", "errors", "head_errors"} for each, the last two
    as {arm: {tensor: error}}: the relative L2 error of the layer as a whole, and the RMS over heads
    of the relative L2 error of a head, in which a head with a tiny gradient weighs as much as any
    other. ``first_key`` is the mean probability of the first key."""
    for index, layer in enumerate(layers):
        squares = {arm: {} for arm in arms}
        logits, shares, queries = [], 0.0, 0
        for piece in layer.pieces():
            exact = _exact_by_head(piece)
            logits.append(exact["max_logit"])
            shares += exact["first_key"] * piece.q.shape[2]
            queries += piece.q.shape[2]
            for arm, attend in arms.items():
                _add_squares(squares[arm], _results(piece, attend), exact)
        yield {
            "layer": index,
            "max_logit": max(logits),
            "first_key": shares / queries,
            "errors": {arm: _of_layer(sums) for arm, sums in squares.items()},
            "head_errors": {arm: _of_heads(sums) for arm, sums in squares.items()},
        }


def _exact_by_head(layer):
    """Exact attention, one key head at a time: it holds [heads, n, n] tensors."""
    group = layer.q.shape[1] // layer.k.shape[1]
    parts = []
    for h in range(layer.k.shape[1]):
        queries, keys = slice(h * group, (h + 1) * group), slice(h, h + 1)
        part = replace(
            layer,
            q=layer.q[:, queries],
            k=layer.k[:, keys],
            v=layer.v[:, keys],
            dout=layer.dout[:, queries],
        )
        whole = _exact(part)
        parts.append({name: whole[name] for name in TENSORS})
        parts[-1].update(max_logit=whole["max_logit"], first_key=whole["P"][..., 0].mean().item())
    return {
        **{name: torch.cat([p[name] for p in parts], 1) for name in TENSORS},
        "max_logit": max(p["max_logit"] for p in parts),
        "first_key": sum(p["first_key"] for p in parts) / len(parts),
    }


def _results(layer, attend):
    leaves = [t.clone().requires_grad_() for t in (layer.q, layer.k, layer.v)]
    out = attend(layer, *leaves)
    grads = torch.autograd.grad(out, leaves, layer.dout.to(out.dtype))
    return dict(zip(TENSORS, (out.detach(), *grads)))


def _add_squares(sums, got, exact):
    """Squared errors and squared norms of every head, over all pieces of a layer."""
    for name in TENSORS:
        by_head = lambda t: t.double().square().sum((0, 2, 3))
        error, norm = sums.get(name, (0.0, 0.0))
        sums[name] = (
            error + by_head(got[name].double() - exact[name]),
            norm + by_head(exact[name]),
        )


def _of_layer(sums):
    return {name: _ratio(e.sum(), n.sum()).sqrt().item() for name, (e, n) in sums.items()}


def _of_heads(sums):
    return {name: _ratio(e, n).mean().sqrt().item() for name, (e, n) in sums.items()}


def _ratio(error, norm):
    """Where the exact value is 0, whatever else is infinitely wrong."""
    return torch.where(error == 0, 0.0, error / norm)


def totals(rows, which="errors"):
    """{arm: {tensor: RMS over layers}}."""
    mean = lambda values: math.sqrt(sum(v * v for v in values) / len(values))
    return {
        arm: {name: mean([row[which][arm][name] for row in rows]) for name in TENSORS}
        for arm in rows[0][which]
    }


def verdicts(rows):
    """{arm: words}: the worst layer, and whether it is fine, usable or too far off."""
    return {arm: _verdict(arm, rows) for arm in rows[0]["errors"]}


def _verdict(arm, rows):
    errors = [(row["errors"][arm][t], row["layer"], t) for row in rows for t in TENSORS]
    broken = sorted({layer for error, layer, _ in errors if not error <= USABLE})  # NaN too
    if broken:
        return f"too far off in layer {', '.join(map(str, broken))}"
    error, layer, tensor = max(errors)
    state = "fine" if error < FINE else "usable"
    return f"{state}; worst {tensor} of layer {layer}, {100 * error:.1f} %"
