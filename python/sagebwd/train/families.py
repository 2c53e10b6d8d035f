# SPDX-License-Identifier: Apache-2.0
"""Which hard inputs a layer has: the families of ``sagebwd trace --inputs`` by their marks."""

from dataclasses import dataclass

#: From which figures on a layer is said to belong to a family.
SINK, CHANNEL, SHARP = 0.3, 6.0, 0.9


@dataclass(frozen=True)
class Families:
    sink_share: float  # probability that the strongest key takes, mean over queries
    sink_key: int
    channel: float  # largest channel of Q or K, over the median one; K without its mean
    sharpness: float  # largest probability of a row, mean over rows

    @staticmethod
    def of(layer, p):
        """``p``: exact probabilities [1, h, n, n]. The head in which a mark is strongest counts."""
        share, key = p.mean(2).flatten(0, 1).max(-1)
        head = share.argmax()
        return Families(
            share[head].item(),
            key[head].item(),
            max(_outlier(layer.q), _outlier(layer.k - layer.k.mean(2, keepdim=True))),
            p.amax(-1).mean(-1).max().item(),
        )

    def words(self):
        found = []
        if self.sink_share >= SINK:
            found.append(f"a sink: key {self.sink_key} takes {100 * self.sink_share:.0f} %")
        if self.channel >= CHANNEL:
            found.append(f"an outlier channel of q or k, {self.channel:.0f} times the median")
        if self.sharpness >= SHARP:
            found.append(f"sharp rows: {100 * self.sharpness:.0f} % on one key each")
        return found


def _outlier(x):
    size = x.double().square().mean(2).sqrt()  # [1, h, d]
    return (size.amax(-1) / size.median(-1).values.clamp_min(1e-30)).max().item()
