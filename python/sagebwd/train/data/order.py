# SPDX-License-Identifier: Apache-2.0
"""The order in which sequences are read. It depends only on the seed and the step, so a run that is
resumed, or spread over more ranks, reads the same sequences.

An epoch cuts every shard into windows of ``context`` tokens, beginning at an offset of its own, and
takes them in a random order.
"""

import bisect

import numpy as np
import torch

from ..errors import BadInput

#: Data up to this size moves to the GPU as a whole; more stays where it is (memory-mapped files).
_ON_DEVICE = 8 << 30
#: Of one run. Nobody reads the same data so often; a number beyond it is a mistake.
_EPOCHS = 100_000


class Batches:
    """Sequences of a stream, by their place in the order."""

    def __init__(self, shards, context, seed, device):
        self.context, self.seed, self.device = context, seed, device
        self.shards = [s for s in shards if len(s) > context]
        self.bases = np.cumsum([0] + [len(s) for s in self.shards])
        self.tokens = _to_device(self.shards, device)
        self._steps = torch.arange(context + 1, device=device)
        self._epoch = (-1, None)
        self._ends = [0]  # sequences before epoch 0, 1, ...

    def rows(self, first, count):
        """Sequences first, first + 1, ... of the endless order: [count, context + 1] int64."""
        starts = []
        while count > 0:
            epoch, at = self._locate(first)
            all_ = self._starts(epoch)
            part = all_[at : at + count]
            starts.append(part)
            first, count = first + len(part), count - len(part)
        return self.windows(np.concatenate(starts))

    def windows(self, starts):
        """The sequences that begin at these positions of the stream."""
        if self.tokens is None:
            rows = np.stack([self._row(int(s)) for s in starts])
            return torch.from_numpy(rows).to(self.device, non_blocking=True)
        at = torch.from_numpy(np.ascontiguousarray(starts)).to(self.device)
        return _ids(self.tokens[at[:, None] + self._steps])

    def _row(self, start):
        i = bisect.bisect_right(self.bases, start) - 1
        at = start - int(self.bases[i])
        return self.shards[i][at : at + self.context + 1].astype(np.int64)

    def _locate(self, index):
        """(epoch, place in it). Offsets differ by epoch, so the number of windows may too."""
        if index > _EPOCHS * self._size(0):
            raise BadInput(
                f"data: sequence {index} would be beyond {_EPOCHS} epochs of this data, which has "
                f"{self._size(0)} sequences of {self.context} tokens; give more data or fewer steps"
            )
        while index >= self._ends[-1]:
            self._ends.append(self._ends[-1] + self._size(len(self._ends) - 1))
        epoch = bisect.bisect_right(self._ends, index) - 1
        return epoch, index - self._ends[epoch]

    def _offset(self, epoch):
        # The first epoch begins at 0. The others begin anywhere that leaves every shard a window.
        slack = min(self.context - 1, min(map(len, self.shards)) - self.context - 1)
        if epoch == 0 or slack < 1:
            return 0
        return int(np.random.default_rng((self.seed, epoch, 1)).integers(0, slack + 1))

    def _size(self, epoch):
        offset = self._offset(epoch)
        return sum((len(s) - 1 - offset) // self.context for s in self.shards)

    def _starts(self, epoch):
        if self._epoch[0] != epoch:
            offset = self._offset(epoch)
            all_ = np.concatenate([
                base + offset + self.context * np.arange((len(s) - 1 - offset) // self.context)
                for base, s in zip(self.bases, self.shards)
            ])  # fmt: skip
            np.random.default_rng((self.seed, epoch, 0)).shuffle(all_)
            self._epoch = (epoch, all_)
        return self._epoch[1]


def evaluation_windows(batches, tokens, multiple):
    """Starts of the windows an evaluation reads: evenly spread over the stream, always the same, a
    multiple of ``multiple`` of them (repeated where the stream is short)."""
    all_ = np.concatenate([
        base + batches.context * np.arange((len(s) - 1) // batches.context)
        for base, s in zip(batches.bases, batches.shards)
    ])  # fmt: skip
    wanted = max(1, round(tokens / batches.context / multiple)) * multiple
    if wanted > len(all_):
        wanted = max(1, len(all_) // multiple) * multiple
    return all_[np.arange(wanted) * len(all_) // wanted]


def _to_device(shards, device):
    """One tensor of all tokens: int16 with the bits of uint16, or int32. None: too large for
    that."""
    size = sum(s.nbytes for s in shards)
    if size > _ON_DEVICE:
        return None
    wide = any(s.dtype.itemsize > 2 for s in shards)
    whole = np.concatenate([s.astype("<u4" if wide else "<u2") for s in shards])
    return torch.from_numpy(whole.view("<i4" if wide else "<i2")).to(device)


def _ids(values):
    return values.long() & 0xFFFF if values.dtype == torch.int16 else values.long()
