"""A ViT in Lightning, with AdamW, accumulation, clipping and dropout: every fourth step is kept, to be done again.

    python train_lightning.py runs/torch

Then, where PaddlePaddle is and PyTorch need not be, `replay_hapi.py` does these steps again.
"""

import sys

import lightning.pytorch as pl
import numpy as np
import torch
from torch.nn import functional

from padiff_lightning import PaDiffCallback

DIM, DEPTH, HEADS, PATCH, SIZE, CLASSES, DROP = 32, 2, 4, 4, 16, 10, 0.1


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(DIM), torch.nn.LayerNorm(DIM)
        self.qkv, self.proj = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)
        self.fc1, self.fc2 = torch.nn.Linear(DIM, 4 * DIM), torch.nn.Linear(4 * DIM, DIM)
        self.drop = torch.nn.Dropout(DROP)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=DROP if self.training else 0.0)
        x = x + self.drop(self.proj(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.fc2(self.drop(functional.gelu(self.fc1(self.norm2(x))))))


class ViT(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.patch = torch.nn.Conv2d(3, DIM, PATCH, stride=PATCH)
        self.token = torch.nn.Parameter(torch.randn(1, 1, DIM) * 0.02)
        self.position = torch.nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2 + 1, DIM) * 0.02)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = torch.nn.LayerNorm(DIM), torch.nn.Linear(DIM, CLASSES)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])

    def training_step(self, batch, index):
        images, labels = batch
        return functional.cross_entropy(self(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3, weight_decay=0.05)


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        random = np.random.RandomState(index)
        return torch.from_numpy(random.randn(3, SIZE, SIZE).astype("float32")), random.randint(CLASSES)


pl.seed_everything(0)
callback = PaDiffCallback(sys.argv[1], every_n_steps=4, replay_every_n_steps=4)
trainer = pl.Trainer(
    max_epochs=1,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[callback],
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(ViT(), torch.utils.data.DataLoader(Images(), batch_size=4, shuffle=True))
