# SPDX-License-Identifier: Apache-2.0
"""INT8 attention for the models that verl trains and scores with. Its workers import the modules
that a configuration names, and give transformers the name of an attention:

    actor_rollout_ref.model.external_lib=sagebwd.integrations.verl
    +actor_rollout_ref.model.override_config.attn_implementation=sagebwd

Unlike the other hooks this one acts when it is imported, because verl does nothing else with it.
Rows without padding (``use_remove_padding``) work. For another recipe, name a module of your own
that calls :func:`register`.
"""

import sys

from . import transformers


def register(name="sagebwd", **options):
    """:func:`.transformers.register`, with a refusal of verl's sequence parallelism, which is
    inside of FlashAttention. Returns the name."""
    from transformers import AttentionInterface

    transformers.register(name, **options)
    ours = AttentionInterface()[name]

    def attend(*args, **kwargs):
        _refuse_sequence_parallelism()
        return ours(*args, **kwargs)

    AttentionInterface.register(name, attend)
    return name


def _refuse_sequence_parallelism():
    ulysses = sys.modules.get("verl.utils.ulysses")
    ranks = ulysses.get_ulysses_sequence_parallel_world_size() if ulysses else 1
    if ranks > 1:
        raise NotImplementedError(
            f"sagebwd: verl's ulysses_sequence_parallel_size={ranks} is not supported, because it "
            "is inside FlashAttention and each rank would see its own tokens alone: set it to 1"
        )


register()
