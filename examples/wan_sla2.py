# SPDX-License-Identifier: Apache-2.0
"""A Wan model with SLA2: stage 1, stage 2, save, load, and use in a pipeline.
python examples/wan_sla2.py"""

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers import WanTransformer3DModel as Wan

from sagebwd import sla2

torch.manual_seed(0)
# Wan.from_pretrained(name, subfolder="transformer", torch_dtype=torch.bfloat16)
model = Wan(num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4,
            text_dim=16, freq_dim=16, ffn_dim=64, num_layers=2)  # fmt: skip
clip, text = torch.randn(1, 4, 4, 32, 32), torch.randn(1, 8, 16)  # 1024 tokens
print("converted:", sla2.convert(model, keep=0.2, order="cube"))


def noisy():
    time, noise = torch.rand(1), torch.randn_like(clip)
    return ((1 - time) * clip + time * noise, 1000 * time, text), noise - clip


# Stage 1: routers and α learn from full attention. A real model: 200 steps, dozens of batches.
print(sla2.fit(model, [noisy()[0] for _ in range(3)], steps=10))

# Stage 2: all weights; α with ten times their learning rate.
alpha = [p for name, p in model.named_parameters() if ".sla2.alpha" in name]
others = [p for name, p in model.named_parameters() if p.requires_grad and ".sla2." not in name]
optimizer = torch.optim.AdamW([dict(params=others, lr=1e-4), dict(params=alpha, lr=1e-3)])
for step in range(1, 6):
    inputs, target = noisy()
    loss = (model(*inputs).sample - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")

sla2.save(model, "build/wan_sla2")
model = sla2.load(Wan, "build/wan_sla2")
vae = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                       latents_mean=[0.0] * 4, latents_std=[1.0] * 4)  # fmt: skip
pipeline = WanPipeline(None, None, vae, FlowMatchEulerDiscreteScheduler(shift=3), model)
out = pipeline(prompt_embeds=text, negative_prompt_embeds=torch.zeros_like(text), height=256,
               width=256, num_frames=13, num_inference_steps=2, output_type="latent")  # fmt: skip
print("latents", tuple(out.frames.shape))
