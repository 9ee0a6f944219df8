"""A small ViT with dropout wherever one has it, as two people would write it: layers here, functions there."""

from __future__ import annotations

import paddle
import torch

DIM, DEPTH, HEADS, SIZE, PATCH, CLASSES, DROP = 16, 1, 2, 8, 4, 3, 0.1
TOKENS = (SIZE // PATCH) ** 2 + 1


class TorchBlock(torch.nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(DIM), torch.nn.LayerNorm(DIM)
        self.qkv, self.proj = torch.nn.Linear(DIM, 3 * DIM), torch.nn.Linear(DIM, DIM)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(DIM, 2 * DIM), torch.nn.GELU(), torch.nn.Dropout(drop), torch.nn.Linear(2 * DIM, DIM)
        )
        self.drop = torch.nn.Dropout(drop)
        self.rate = drop

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.rate if self.training else 0.0)
        x = x + self.drop(self.proj(seen.transpose(1, 2).reshape(batch, tokens, DIM)))
        return x + self.drop(self.mlp(self.norm2(x)))


class TorchViT(torch.nn.Module):
    def __init__(self, drop=DROP):
        super().__init__()
        self.patch = torch.nn.Conv2d(3, DIM, PATCH, stride=PATCH)
        self.token = torch.nn.Parameter(torch.randn(1, 1, DIM) * 0.02)
        self.position = torch.nn.Parameter(torch.randn(1, TOKENS, DIM) * 0.02)
        self.drop = torch.nn.Dropout(drop)
        self.blocks = torch.nn.ModuleList([TorchBlock(drop) for _ in range(DEPTH)])
        self.norm = torch.nn.LayerNorm(DIM)
        self.head = torch.nn.Linear(DIM, CLASSES)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.drop(x + self.position)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class PaddleAttention(paddle.nn.Layer):
    def __init__(self, drop):
        super().__init__()
        self.qkv, self.proj = paddle.nn.Linear(DIM, 3 * DIM), paddle.nn.Linear(DIM, DIM)
        self.drop = drop

    def forward(self, x):
        tokens, F = x.shape[1], paddle.nn.functional
        q, k, v = self.qkv(x).reshape((-1, tokens, 3, HEADS, DIM // HEADS)).transpose((2, 0, 3, 1, 4))
        weights = F.softmax(q.matmul(k.transpose((0, 1, 3, 2))) * (DIM // HEADS) ** -0.5)
        weights = F.dropout(weights, self.drop, training=self.training)
        return self.proj(weights.matmul(v).transpose((0, 2, 1, 3)).reshape((-1, tokens, DIM)))


class PaddleMlp(paddle.nn.Layer):
    def __init__(self, drop):
        super().__init__()
        self.fc1, self.fc2 = paddle.nn.Linear(DIM, 2 * DIM), paddle.nn.Linear(2 * DIM, DIM)
        self.drop = drop

    def forward(self, x):
        F = paddle.nn.functional
        x = F.dropout(F.gelu(self.fc1(x)), self.drop, training=self.training)
        return F.dropout(self.fc2(x), self.drop, training=self.training)


class PaddleBlock(paddle.nn.Layer):
    def __init__(self, drop):
        super().__init__()
        self.ln1, self.ln2 = paddle.nn.LayerNorm(DIM), paddle.nn.LayerNorm(DIM)
        self.attention, self.mlp = PaddleAttention(drop), PaddleMlp(drop)
        self.dropout = paddle.nn.Dropout(drop)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.ln1(x)))
        return x + self.mlp(self.ln2(x))


class PaddleViT(paddle.nn.Layer):
    def __init__(self, drop=DROP):
        super().__init__()
        start = paddle.nn.initializer.Normal(0.0, 0.02)
        self.embed = paddle.nn.Conv2D(3, DIM, PATCH, stride=PATCH)
        self.cls_token = self.create_parameter((1, 1, DIM), default_initializer=start)
        self.pos = self.create_parameter((1, TOKENS, DIM), default_initializer=start)
        self.pos_drop = paddle.nn.Dropout(drop)
        self.layers = paddle.nn.LayerList([PaddleBlock(drop) for _ in range(DEPTH)])
        self.ln = paddle.nn.LayerNorm(DIM)
        self.classifier = paddle.nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose((0, 2, 1))
        x = paddle.concat([self.cls_token.expand((x.shape[0], -1, -1)), x], 1)
        x = self.pos_drop(x + self.pos)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.ln(x)[:, 0])
