# SPDX-License-Identifier: Apache-2.0
"""The gradient audit. Every k steps it takes one attention layer in turn, computes it in float64 on
a held-out sequence, and compares that with the run's attention for the same q, k, v and dO.

It costs one forward and backward of one sequence. It touches neither gradients nor random numbers,
so a run with audits has the same losses as one without.
"""

from dataclasses import asdict, dataclass, field, replace

import torch

from .._ops import attention as ops
from ..attention import attention
from ..tools.capture import Layer
from ..tools.diagnosis import _exact, _rebuilt_p, _repeat, _value_codes
from .attend import make_attend
from .families import Families

#: Limits of the alarms. The projection is the part of the error along the true gradient, which does
#: not average out over a batch.
PROJECTION, COSINE, ROW_SUM = -0.01, 0.99, 0.03
_HEADS = 2  # audited of a layer: float64 attention of all would cost more than the step


@dataclass
class Audit:
    layer: int
    rel_l2: dict = field(default_factory=dict)  # of O, dQ, dK, dV
    cosine: dict = field(default_factory=dict)
    projection: dict = field(default_factory=dict)
    dead_zone: float = None  # share of non-zero dS whose code is 0, as dQ uses it
    row_sum: float = None  # |row sums of dS| against rows of |dS|: 0 in exact maths
    max_logit: float = None
    inputs: dict = field(default_factory=dict)  # figures of Families: which hard inputs these are
    alarms: list = field(default_factory=list)

    def to_dict(self):
        return asdict(self)


class Auditor:
    def __init__(self, config, model):
        # Without the ring: the audit has the whole sequence.
        self.config, self.model = replace(config, context_parallel=1), model

    def run(self, step, tokens, targets):
        index = step // self.config.audit_every % self.config.layers
        return self.compare(index, *self.capture(index, tokens, targets))

    def capture(self, index, tokens, targets):
        """q, k, v, dO of a layer as [1, h, s, d], some heads of it."""
        seen, module = [], self.model.blocks[index].attention
        module.tap = lambda *tensors: seen.append(tensors)
        try:
            # Compiled blocks know no tap; recomputed ones would call it twice.
            with torch.compiler.set_stance("force_eager"), torch.enable_grad():
                loss = self.model(tokens, targets)
                q, k, v, out = seen[0]
                (dout,) = torch.autograd.grad(loss, out)
        finally:
            module.tap = None
        group = q.shape[2] // k.shape[2]
        kv = max(1, _HEADS // group)
        heads = lambda t, n: t.detach()[:1, :, :n].transpose(1, 2)
        return heads(q, kv * group), heads(k, kv), heads(v, kv), heads(dout, kv * group)

    def compare(self, index, q, k, v, dout):
        layer = Layer(q, k, v, dout, None, True, False, (-1, -1))
        exact = _exact(layer)
        attend = make_attend(self.config, index, self.model.clock)
        leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            out = attend(*leaves)
            grads = torch.autograd.grad(out, leaves, dout.transpose(1, 2).to(out.dtype))
        got = {"O": out, "dQ": grads[0], "dK": grads[1], "dV": grads[2]}
        got = {name: t.detach().transpose(1, 2).double() for name, t in got.items()}
        families = Families.of(layer, exact["P"])
        audit = Audit(index, max_logit=exact["max_logit"], inputs=asdict(families))
        for name, value in got.items():
            audit.rel_l2[name], audit.cosine[name], audit.projection[name] = _metrics(
                value, exact[name]
            )
        if self.config.attention == "sagebwd":
            self._look_at_ds(audit, layer, got["O"])
        audit.alarms = _alarms(audit)
        if audit.alarms:
            audit.alarms += families.words()  # what may have caused them
        return audit

    def _look_at_ds(self, audit, layer, out):
        """dS as the backward makes it: P rebuilt from the codes, D from the INT8 forward's O."""
        recipe = self.config.make_recipe()
        _, lse = attention(
            layer.q, layer.k, layer.v, layout="bhsd", causal=True, recipe=recipe, return_lse=True
        )
        p = _rebuilt_p(layer, recipe, lse)
        if p is None:
            return  # Q-smoothing: its codes are not rebuilt here
        v, dout = _value_codes(_repeat(layer)[1], recipe), layer.dout.double()
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
        rows = ds.abs().sum(-1)
        audit.row_sum = (ds.sum(-1).norm() / rows.norm()).item()
        audit.dead_zone = _dead_zone(ds, layer, recipe)


def _metrics(value, exact):
    """(relative L2 error, cosine, projection of the error on the exact value)."""
    norm = exact.norm()
    if norm == 0:
        return value.norm().item(), 1.0, 0.0
    error = value - exact
    cosine = (value * exact).sum() / (value.norm() * norm).clamp_min(1e-300)
    projection = (error * exact).sum() / norm**2
    return (error.norm() / norm).item(), cosine.item(), projection.item()


def _dead_zone(ds, layer, recipe):
    tile_q, tile_k = _tiles(layer, recipe)
    if recipe.scheme != "paper":
        tile_q = 1
    n = ds.shape[-1]
    pad = torch.nn.functional.pad(ds.abs(), (0, -n % tile_k, 0, -n % tile_q))
    tiles = pad.unflatten(-1, (-1, tile_k)).unflatten(-3, (-1, tile_q))
    step = tiles.amax((-3, -1), keepdim=True) / 127
    there = tiles > 0
    return ((tiles < step / 2) & there).sum().item() / max(1, there.sum().item())


def _tiles(layer, recipe):
    """Queries and keys of a tile, as the backward has them here."""
    options = ops.Options(causal=layer.causal, top_left=layer.top_left, recipe=recipe.text())
    answers = ops.explain(layer.q, layer.k, layer.v, options, is_backward=True)
    return next(map(int, t.split()[0].split("x")) for _, state, t in answers if state == "chosen")


def _alarms(audit):
    alarms = []
    for name in ("dQ", "dK", "dV"):
        projection, cosine = audit.projection[name], audit.cosine[name]
        # Written so that NaN alarms too.
        if not projection >= PROJECTION:
            alarms.append(f"{name} projection {projection:.4f} < {PROJECTION}")
        if not cosine >= COSINE:
            alarms.append(f"{name} cosine {cosine:.4f} < {COSINE}")
    if audit.row_sum is not None and not audit.row_sum <= ROW_SUM:
        alarms.append(f"dS row sums {audit.row_sum:.4f} > {ROW_SUM}")
    return alarms
