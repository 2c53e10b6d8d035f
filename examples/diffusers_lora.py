# SPDX-License-Identifier: Apache-2.0
"""LoRA of a video or image transformer of diffusers (here Wan; Flux and others are alike), trained
by flow matching.    python examples/diffusers_lora.py"""

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from sagebwd.integrations import diffusers as sage

torch.manual_seed(0)
# WanTransformer3DModel.from_pretrained(name, subfolder="transformer", torch_dtype=torch.bfloat16)
model = WanTransformer3DModel(
    num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
    freq_dim=16, ffn_dim=64, num_layers=2,
)  # fmt: skip
model.requires_grad_(False)
targets = ["to_q", "to_k", "to_v", "to_out.0"]
model.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=targets))
weights = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(weights, lr=1e-3)

clip, text = torch.randn(1, 4, 3, 16, 16), torch.randn(1, 8, 16)
with sage.enabled() as seen:
    for step in range(1, 11):
        time, noise = torch.rand(1), torch.randn_like(clip)
        noisy = (1 - time) * clip + time * noise
        loss = (model(noisy, 1000 * time, text).sample - (noise - clip)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step:2} loss {loss.item():.4f}")
print(seen)
