# SPDX-License-Identifier: Apache-2.0
"""Every attention call of one batch: the errors that INT8 would have had in it, and how much a
causal one lets later tokens change earlier results."""

import math
from dataclasses import dataclass

import torch

from ...attention import attention
from .. import diagnosis

TENSORS = ("O", "dQ", "dK", "dV")


@dataclass
class Examined:
    """One attention call of the model."""

    module: str
    shape: tuple  # heads, key heads, queries, keys, head dim
    causal: bool
    report: diagnosis.LayerReport
    leak: float  # nan where nothing is causal

    @property
    def worst(self):
        """The largest error, or nan of a call that was not compared."""
        return max((self.report.errors[t] for t in TENSORS if self.report.errors), default=math.nan)


def examine(subject, recipe):
    """[Examined] of a forward and a backward; none where the model multiplies matrices itself."""
    try:
        layers = diagnosis._run(subject.model, subject.batch, subject.loss)
    except diagnosis.NoAttention:
        return []
    return [
        Examined(
            layer.module,
            (layer.q.shape[1], layer.k.shape[1], layer.q.shape[2], layer.k.shape[2],
             layer.q.shape[3]),
            layer.causal,
            report := diagnosis._layer(i, layer, recipe),
            leak(layer, recipe) if report.errors else math.nan,
        )
        for i, layer in enumerate(layers)
    ]  # fmt: skip


def leak(layer, recipe):
    """How much the results of the first half change when the second half is not there: the relative
    L2 norm of the change. What generation computes with few tokens, scoring computes with all."""
    piece = max(layer.pieces(), key=lambda piece: piece.q.shape[2])
    tokens = piece.q.shape[2]
    if not piece.causal or tokens != piece.k.shape[2] or tokens < 4:
        return math.nan
    half = tokens // 2 | 1  # no multiple of a tile
    options = dict(
        layout="bhsd", causal=True, softmax_scale=piece.scale, window_size=piece.window,
        recipe=recipe,
    )  # fmt: skip
    with torch.no_grad():
        whole = attention(piece.q, piece.k, piece.v, **options)[:, :, :half]
        alone = attention(*(t[:, :, :half] for t in (piece.q, piece.k, piece.v)), **options)
    return ((whole.double() - alone.double()).norm() / alone.double().norm()).item()
