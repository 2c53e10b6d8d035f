# SPDX-License-Identifier: Apache-2.0
"""Stage 1: the router and α of every layer learn to give what full attention gives.

With a soft mask, a mask of equal numbers is full attention, so the objective as published teaches
the router to choose nothing. Here the forward has the hard mask, as in use, and gradients go
through SoftTop-k at a low temperature.
"""

import contextlib
from dataclasses import dataclass

import torch

from .. import arguments
from .attention import Attention, cast
from .dense import Rows
from .soft_top_k import soft_top_k


@dataclass
class Layer:
    """What :func:`fit` found in one layer; lists have one number per head. Errors are relative L2
    errors of the hard output against full attention, on data that was held out."""

    name: str
    identity: list  # Wq = Wk = 1, α fitted
    trained: list  # Wq, Wk and α fitted
    softness: list  # mean of m(1 - m) over the chosen share: how far SoftTop-k is from hard
    kept: list  # whether the head took what was trained

    @property
    def error(self):
        return [t if kept else i for t, i, kept in zip(self.trained, self.identity, self.kept)]


class Table(list):
    """Layers in the order of the model; printed as a table."""

    def __str__(self):
        mean = lambda numbers: sum(numbers) / len(numbers)
        width = max(len(layer.name) for layer in self)
        lines = [f"{'layer':{width}}  identity  trained  softness  heads trained"]
        for layer in self:
            lines.append(
                f"{layer.name:{width}}  {mean(layer.identity):8.4f}  {mean(layer.error):7.4f}  "
                f"{mean(layer.softness):8.3f}  {sum(layer.kept)} of {len(layer.kept)}"
            )
        return "\n".join(lines)


def fit(
    model,
    batches,
    steps=200,
    *,
    router=True,
    lr=1e-2,
    alpha_lr=5e-2,
    temperature=0.2,
    queries=512,
    seed=0,
    report=None,
):
    """Trains the routers and α of a converted model, a layer at a time, and returns a
    :class:`Table`. No other weight changes.

    batches
        Inputs of the model: dicts (keyword arguments), tuples (positional) or one tensor each; two
        at least. The last is held out. For every layer the model runs over all of them once, with
        full attention and under the autocast of the caller, and the q, k and v of that layer are
        kept in memory.
    steps
        Of Adam for the router of a layer, and as many for α alone before.
    router
        False: α alone learns, with Wq = Wk = 1.
    temperature
        Of SoftTop-k, in row deviations of the scores.
    queries
        Per step and sequence. A step costs queries × tokens for every head, in float32.
    report
        Called with each :class:`Layer` when it is done.

    A head whose hard error on the held-out batch did not get smaller keeps Wq = Wk = 1 and the α
    that was fitted to them.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
    if not layers:
        raise ValueError(
            "model: expected sagebwd.sla2.Attention inside, found none; sla2.convert(model) puts "
            "it in"
        )
    dense = [name for name, m in layers.items() if m.keep == 1]
    if dense:
        raise ValueError(f"model: expected keep below 1, got 1 in {', '.join(dense)}")
    batches = list(batches)
    if len(batches) < 2:
        raise ValueError(
            f"batches: expected two or more (the last is held out), got {len(batches)}"
        )
    steps = arguments.integer("steps", steps, 1, 2**31 - 1, "a number of steps")
    queries = arguments.integer("queries", queries, 1, 2**31 - 1, "a number of queries")
    table = Table()
    for name, module in layers.items():
        generator = torch.Generator().manual_seed(seed)
        calls = _calls(model, batches, layers, name)
        # Autocast is for the model; all that is float32 here stays so.
        with torch.autocast(calls[1][0][0].device.type, enabled=False):
            student = _Student(module, calls, temperature, queries, generator)
            table.append(student.fit(name, steps, lr if router else None, alpha_lr))
        if report is not None:
            report(table[-1])
    return table


def _calls(model, batches, layers, name):
    """The q, k and v that a layer has with full attention: (one list per training batch, held
    out)."""
    found = []
    keep = {module: module.keep for module in layers.values()}
    take = lambda module, args: found[-1].append(tuple(x.detach() for x in cast(*args)))
    handle = layers[name].register_forward_pre_hook(take)
    try:
        for module in keep:
            module.keep = 1
        for batch in batches:
            found.append([])
            _run(model, batch)
    finally:
        handle.remove()
        for module, share in keep.items():
            module.keep = share
    if not found[-1] or not any(found[:-1]):
        raise ValueError(f"model: expected every batch to reach {name}, but one did not")
    return [call for batch in found[:-1] for call in batch], found[-1]


@torch.no_grad()
def _run(model, batch):
    if isinstance(batch, dict):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)


class _Student:
    """The training of one layer."""

    def __init__(self, module, calls, temperature, queries, generator):
        self.module, self.router = module, module.router
        self.train, self.held_out = calls
        self.temperature, self.queries, self.generator = temperature, queries, generator
        self.softness = torch.zeros(module.heads)

    def fit(self, name, steps, lr, alpha_lr):
        router = [self.router.wq, self.router.wk]
        alpha = list(self.module.alpha.parameters())
        with _as_float32([*router, *alpha]):
            eye = torch.eye(self.module.head_dim, device=router[0].device).expand_as(router[0])
            for w in router:
                w.data = eye.clone()
            self._descend([(alpha, alpha_lr)], steps)
            before = [p.detach().clone() for p in (*router, *alpha)]
            identity = self.errors()
            trained = identity
            if lr is not None:
                self._descend([(router, lr), (alpha, alpha_lr / 5)], steps)
                trained = self.errors()
            # NaN is no improvement.
            kept = trained < identity
            for p, old in zip((*router, *alpha), before):
                keep = kept.reshape(-1, *[1] * (p.dim() - 1)).to(p.device)
                p.data = torch.where(keep, p.data, old)
        lists = (identity.tolist(), trained.tolist(), self.softness.tolist(), kept.tolist())
        return Layer(name, *lists)

    def _descend(self, groups, steps):
        asked = {p: p.requires_grad for group, _ in groups for p in group}
        for p in asked:
            p.requires_grad_()
        adam = torch.optim.Adam([{"params": group, "lr": lr} for group, lr in groups])
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
        with torch.enable_grad():
            for step in range(steps):
                adam.zero_grad()
                self._loss(self.train[step % len(self.train)]).backward()
                adam.step()
                decay.step()
        for p, flag in asked.items():
            p.requires_grad_(flag)
            p.grad = None

    def _loss(self, call):
        """The squared relative error of each head, summed over heads, of some rows."""
        q, k, v = call
        router = self.router
        block = router.block_q
        total = -(-q.shape[1] // block)
        some = torch.randperm(total, generator=self.generator)[: max(1, self.queries // block)]
        with torch.no_grad():
            rows = Rows(q, k, v, some.to(q.device), block, router.block_k, self.module.causal)
            found = router.route(q, k, self.module.keep)
            q, k = router.pooled(q, k)
        if found is None:  # a sequence so short that everything is seen teaches nothing
            return sum(0.0 * p.sum() for p in self.module.parameters() if p.requires_grad)
        hard = found[1].to_mask()[:, :, some].float()
        mask = self._mask(router.scores(q[:, :, some], k), hard, some.tolist())
        some = some.to(q.device)

        def alpha(lse, norm):
            if self.module.alpha.uses_norms:
                return self.module.alpha(lse, norm)
            return self.module.alpha(total)[None, :, some, None]

        wrong = (rows.out(mask, alpha) - rows.full).where(rows.valid, 0.0)
        over = lambda x: x.square().sum((0, 2, 3, 4))
        return (over(wrong) / over(rows.full.where(rows.valid, 0.0))).sum()

    def _mask(self, scores, hard, rows):
        """The hard mask with the gradient of SoftTop-k. What has no choice, blocks that are always
        seen or never, has no gradient either."""
        if not scores.requires_grad:
            return hard
        soft, found = torch.zeros_like(hard), []
        for places, blocks, entries in self.router.choices(rows, hard.shape[-1], self.module.keep):
            free = [block for block in range(blocks) if block not in self.router.always]
            entries -= blocks - len(free)
            if not 0 < entries < len(free):
                continue
            at = (slice(None), slice(None), torch.tensor(places)[:, None], torch.tensor(free))
            part = scores[at]
            deviation = part.detach().std(-1, keepdim=True).mean((0, 2), keepdim=True)
            m = soft_top_k(part, entries, self.temperature * deviation.clamp(min=1e-20))
            found.append((m * (1 - m)).detach().sum(-1).mean((0, 2)).div(entries))
            soft[at] = m - m.detach()  # 0 to the last bit
        if found:
            self.softness = torch.stack(found).mean(0).cpu()
        return hard + soft

    @torch.no_grad()
    def errors(self):
        """The relative error of each head of the module itself, on the batch that is held out."""
        wrong = whole = 0.0
        for q, k, v in self.held_out:
            out = self.module(q, k, v).float()
            for full, part in _full(q, k, v, self.queries, self.module.causal):
                wrong = wrong + (out[:, part] - full).square().sum((0, 1, 3))
                whole = whole + full.square().sum((0, 1, 3))
        return (wrong / whole).sqrt().cpu()


def _full(q, k, v, queries, causal):
    """Full attention in float32, some queries at a time, with their places: [b, s, h, d]."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.float().transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    place = torch.arange(k.shape[2], device=k.device)
    for first in range(0, q.shape[1], queries):
        part = slice(first, first + queries)
        x = q[:, part].float().transpose(1, 2)
        mask = place <= place[part, None] if causal else None
        out = torch.nn.functional.scaled_dot_product_attention(x, k, v, attn_mask=mask)
        yield out.transpose(1, 2), part


@contextlib.contextmanager
def _as_float32(parameters):
    """Parameters that are float32 for the time of the block."""
    dtypes = [p.dtype for p in parameters]
    for p in parameters:
        p.data = p.data.float()
    try:
        yield
    finally:
        for p, dtype in zip(parameters, dtypes):
            p.data = p.data.to(dtype)
