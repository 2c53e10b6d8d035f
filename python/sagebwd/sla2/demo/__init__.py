# SPDX-License-Identifier: Apache-2.0
"""Image-to-video flow matching on clips made on the fly: full, sparse and sparse-linear attention
from one start."""
