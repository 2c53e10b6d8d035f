# SPDX-License-Identifier: Apache-2.0
"""torchtitan. Its own trainer needs one option and no code:
--override.imports sagebwd.integrations.torchtitan_override.varlen
This script does to a model of torchtitan what that option does.
python examples/torchtitan_override.py"""

import torch
import torch.nn.functional as F
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import create_varlen_metadata_for_document
from torchtitan.models.llama3 import llama3_configs

config = llama3_configs["debugmodel"]("varlen")
config.layers = config.layers[:2]
imports = ["sagebwd.integrations.torchtitan_override.varlen"]
print("replaced:", len(apply_overrides(OverrideConfig(imports=imports), config)))

torch.manual_seed(0)
model = config.build()
model.init_states()
model.float()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.arange(64).expand(2, 64) % 50
places = torch.cat([torch.arange(24), torch.arange(40)]).expand(2, 64)  # two documents in a row
documents = create_varlen_metadata_for_document(places)
for step in range(1, 6):
    logits = model(tokens, places, documents).float()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
