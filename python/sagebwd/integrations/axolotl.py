# SPDX-License-Identifier: Apache-2.0
"""A plugin for axolotl, whose validator knows no other names of attention than its own.

    plugins:
      - sagebwd.integrations.axolotl.SagePlugin
    attn_implementation: sdpa         # what the model is built with; the plugin replaces it
    sagebwd:                          # optional: arguments of integrations.transformers.register
      recipe: vectorwise
      exact_layers: [3]

The plugin switches the model over after it is built and before adapters are added. Packed rows
(``sample_packing``) and padding work as in :mod:`.transformers`.
"""

from axolotl.integrations.base import BasePlugin

from . import transformers


class SagePlugin(BasePlugin):
    """INT8 attention in the model that axolotl trains."""

    def get_input_args(self):
        """Where axolotl finds the declaration of the key ``sagebwd``."""
        return "sagebwd.integrations.axolotl_arguments.SageArguments"

    def post_model_build(self, cfg, model):
        """Refuses what would give wrong answers, and replaces the model's attention."""
        ranks = cfg.context_parallel_size or 1
        if ranks > 1:
            raise NotImplementedError(
                f"sagebwd: context_parallel_size: {ranks} is not supported, because axolotl's ring "
                "is inside FlashAttention and each rank would see its own tokens alone: set "
                "context_parallel_size: 1"
            )
        if not model.is_backend_compatible():
            raise NotImplementedError(
                f"sagebwd: {type(model).__name__} has attention code of its own, which "
                "transformers cannot replace: leave the plugin out, and put `sagebwd run --` in "
                "front of the command"
            )
        model.set_attn_implementation(transformers.register(**(cfg.sagebwd or {})))
