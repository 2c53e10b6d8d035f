# SPDX-License-Identifier: Apache-2.0
"""Head dims for the hooks of trainers: latent attention has narrower values than keys.

``padded`` gives q, k, v as the operators take them, and the scale of their original head dim.
Values keep their own width, rounded up to a multiple of 8, but for GPUs whose tuned kernels serve
one width alone. Cut the result to v's width again."""

from ..padding import padded

__all__ = ["padded"]
