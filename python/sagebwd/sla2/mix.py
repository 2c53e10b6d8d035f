# SPDX-License-Identifier: Apache-2.0
"""The output: α · sparse + (1 - α) · linear."""

from .._ops import mix as operators


def mix(sparse, linear, alpha, norm=None, block=1):
    """sparse and linear are [b, s, h, d]. α is float32 [b or 1, h, rows], one number for every
    ``block`` queries (1 or a multiple of 64). norm is float32 [b, h, s]: where it is 0, nothing is
    left for the linear branch, and α counts as 1.

    On a GPU the time is that of moving the tensors: forward and backward read each of them once.
    """
    heads_first = (x.transpose(1, 2) for x in (sparse, linear))
    return operators.mix(*heads_first, alpha, norm, block).transpose(1, 2)
