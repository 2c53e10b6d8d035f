# SPDX-License-Identifier: Apache-2.0
"""A real model as evidence: what INT8 attention does to the layers, the gradients and the
fine-tuning of a trained transformers model. ``python -m sagebwd.evidence --help``."""
