# SPDX-License-Identifier: Apache-2.0
"""``sagebwd doctor MODEL``: what INT8 attention would do to a checkpoint of transformers or
diffusers, before anything is trained.

It loads the checkpoint (:mod:`.load`), runs one batch with its own attention and compares INT8 with
exact attention in every layer (:mod:`.layers`), switches the hook on and compares the loss and all
gradients of weights (:mod:`.whole`), times attention of that shape on this machine (:mod:`.speed`),
and says which recipe to take and how to switch it on (:mod:`.advice`).
"""
