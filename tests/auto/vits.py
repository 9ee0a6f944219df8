"""A small ViT with a deconvolution head, as ViTPose is one, written as two people would write it."""

from __future__ import annotations

import numpy as np
import paddle
import torch

DIM, DEPTH, HEADS, SIZE, PATCH = 16, 2, 2, 16, 4
TOKENS = (SIZE // PATCH) ** 2


class TorchAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(DIM, 3 * DIM)
        self.proj = torch.nn.Linear(DIM, DIM)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) * (DIM // HEADS) ** -0.5, -1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, DIM))


class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(DIM, eps=1e-6)
        self.attn = TorchAttention()
        self.norm2 = torch.nn.LayerNorm(DIM, eps=1e-6)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(DIM, 2 * DIM), torch.nn.GELU(), torch.nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TorchPose(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = torch.nn.Conv2d(3, DIM, PATCH, stride=PATCH)
        self.pos_embed = torch.nn.Parameter(torch.randn(1, TOKENS, DIM) * 0.02)
        self.blocks = torch.nn.ModuleList([TorchBlock() for _ in range(DEPTH)])
        self.last_norm = torch.nn.LayerNorm(DIM, eps=1e-6)
        self.head = torch.nn.Sequential(
            torch.nn.ConvTranspose2d(DIM, 8, 4, stride=2, padding=1, bias=False),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 5, 1),
        )

    def forward(self, x):
        x = self.patch_embed(x)
        side = x.shape[-1]
        x = x.flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.last_norm(x)
        return self.head(x.transpose(1, 2).reshape(-1, DIM, side, side))


class PaddleAttention(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.qkv = paddle.nn.Linear(DIM, 3 * DIM)
        self.proj = paddle.nn.Linear(DIM, DIM)

    def forward(self, x):
        tokens = x.shape[1]
        qkv = self.qkv(x).reshape((-1, tokens, 3, HEADS, DIM // HEADS)).transpose((2, 0, 3, 1, 4))
        weights = paddle.nn.functional.softmax(qkv[0].matmul(qkv[1].transpose((0, 1, 3, 2))) * (DIM // HEADS) ** -0.5)
        return self.proj(weights.matmul(qkv[2]).transpose((0, 2, 1, 3)).reshape((-1, tokens, DIM)))


class PaddleMlp(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = (
            paddle.nn.Linear(DIM, 2 * DIM),
            paddle.nn.GELU(),
            paddle.nn.Linear(2 * DIM, DIM),
        )

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class PaddleBlock(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.norm1 = paddle.nn.LayerNorm(DIM, epsilon=1e-6)
        self.attn = PaddleAttention()
        self.norm2 = paddle.nn.LayerNorm(DIM, epsilon=1e-6)
        self.mlp = PaddleMlp()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PaddlePose(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.patch_embed = paddle.nn.Conv2D(3, DIM, PATCH, stride=PATCH)
        self.pos_embed = self.create_parameter((1, TOKENS, DIM))
        self.blocks = paddle.nn.LayerList([PaddleBlock() for _ in range(DEPTH)])
        self.last_norm = paddle.nn.LayerNorm(DIM, epsilon=1e-6)
        self.deconv = paddle.nn.Conv2DTranspose(DIM, 8, 4, stride=2, padding=1, bias_attr=False)
        self.bn = paddle.nn.BatchNorm2D(8)
        self.relu = paddle.nn.ReLU()
        self.final = paddle.nn.Conv2D(8, 5, 1)

    def forward(self, x):
        x = self.patch_embed(x)
        side = x.shape[-1]
        x = x.flatten(2).transpose((0, 2, 1)) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.last_norm(x).transpose((0, 2, 1)).reshape((-1, DIM, side, side))
        return self.final(self.relu(self.bn(self.deconv(x))))


def samples(count=12):
    random = np.random.default_rng(0)
    return random.normal(size=(count, 3, SIZE, SIZE)).astype("float32"), random.normal(
        size=(count, 5, 2 * SIZE // PATCH, 2 * SIZE // PATCH)
    ).astype("float32")


class TorchData(torch.utils.data.Dataset):
    def __init__(self):
        self.images, self.targets = samples()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"img": self.images[index], "target": self.targets[index]}


class PaddleData(paddle.io.Dataset):
    def __init__(self):
        super().__init__()
        self.images, self.targets = samples()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "target": self.targets[index]}


def loaders(batch=4):
    return (
        paddle.io.DataLoader(PaddleData(), batch_size=batch, shuffle=False),
        torch.utils.data.DataLoader(TorchData(), batch_size=batch, shuffle=False),
    )
