# SPDX-License-Identifier: Apache-2.0
"""Lightning. The block around fit() serves every layer that calls PyTorch's attention, forward and
backward.    python examples/lightning_module.py"""

import lightning
import torch
import torch.nn.functional as F

import sagebwd


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(64, 128)
        layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2)
        self.head = torch.nn.Linear(128, 64)

    def training_step(self, tokens, index):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=self.device
        )
        hidden = self.body(self.token(tokens), mask=mask, is_causal=True)
        logits = self.head(hidden)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.print(f"step {index:2} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


rows = (torch.arange(64) + torch.arange(64)[:, None]) % 64
loader = torch.utils.data.DataLoader(rows, batch_size=4)
trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
with sagebwd.integrations.torch_sdpa.enabled() as seen:
    trainer.fit(Model(), loader)
print(seen)  # calls that ran here, and those that did not with the reason
