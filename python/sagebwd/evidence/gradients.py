# SPDX-License-Identifier: Apache-2.0
"""The whole model: its loss, and the gradients of the weights around its attention, under each kind
of attention against exact attention. The weights and everything else are float32."""

import math

import torch

from ..integrations.transformers import number_layers
from .arms import EXACT
from .model import loss_of


def projections(model):
    """{kind: [(layer, weight)]} of the matrices inside of attention modules, such as q_proj."""
    found = {}
    modules = dict(model.named_modules())
    for name, layer in number_layers(model).items():
        for weight_name, weight in modules[name].named_parameters():
            kind = weight_name.removesuffix(".weight")
            if weight.dim() == 2 and kind != weight_name:
                found.setdefault(kind, []).append((layer, weight))
    return found


def measure(model, rows, names, say=print):
    """{"loss": of exact attention, "arms": {arm: {"loss_difference", "errors": {kind: {"all",
    "worst", "worst_layer", "layers"}}}}} for sequences [n, tokens + 1]. ``names``: {arm:
    attn_implementation}, the exact one among them."""
    weights = projections(model)
    exact_loss, exact = _gradients(model, rows, names[EXACT], weights)
    say(f"  {EXACT:12} loss {exact_loss:.4f}")
    arms = {}
    for arm, implementation in names.items():
        if arm == EXACT:
            continue
        loss, grads = _gradients(model, rows, implementation, weights)
        layers = {kind: [layer for layer, _ in found] for kind, found in weights.items()}
        arms[arm] = {
            "loss_difference": loss - exact_loss,
            "errors": {k: errors_of(grads[k], exact[k], layers[k]) for k in weights},
        }
        say(arm_text(arm, arms[arm]))
    return {"loss": exact_loss, "arms": arms}


def _gradients(model, rows, implementation, weights):
    """(mean loss, {kind: [gradient]}) over all sequences, one at a time."""
    model.set_attn_implementation(implementation)
    flat = [weight for found in weights.values() for _, weight in found]
    sums, total = [torch.zeros_like(w) for w in flat], 0.0
    for row in rows.split(1):
        loss = loss_of(model, row) / len(rows)
        total += loss.item()
        for whole, part in zip(sums, torch.autograd.grad(loss, flat)):
            whole += part
    grads = iter(sums)
    return total, {kind: [next(grads) for _ in found] for kind, found in weights.items()}


def errors_of(grads, exact, layers):
    """Relative L2 errors of the gradients of one kind of weight: of all layers together, of the
    worst, of each."""
    error = [(a - b).double().square().sum().item() for a, b in zip(grads, exact)]
    norm = [b.double().square().sum().item() for b in exact]
    relative = lambda e, n: math.sqrt(e / n) if n > 0 else math.inf if e > 0 else 0.0
    by_layer = [relative(e, n) for e, n in zip(error, norm)]
    worst = max(range(len(layers)), key=lambda i: _badness(by_layer[i]))
    return {
        "all": relative(sum(error), sum(norm)),
        "worst": by_layer[worst],
        "worst_layer": layers[worst],
        "layers": by_layer,
    }


def _badness(error):
    """A NaN is the worst of all; max alone would pass it over."""
    return math.inf if math.isnan(error) else error


def worst_of(errors):
    """(kind, its errors) of the kind of weight whose worst layer is the worst."""
    return max(errors.items(), key=lambda item: _badness(item[1]["worst"]))


def arm_text(arm, found):
    cells = ", ".join(f"{kind} {100 * e['all']:.2f} %" for kind, e in found["errors"].items())
    kind, worst = worst_of(found["errors"])
    return (
        f"  {arm:12} loss {found['loss_difference']:+.4f}; {cells}; worst {kind} of layer "
        f"{worst['worst_layer']}, {100 * worst['worst']:.1f} %"
    )
