"""The ViT of `train_lightning.py`, written again for paddle: its kept steps are done again here, dropout on.

    python replay_hapi.py runs/torch runs/paddle

Weights, the optimizer's state, batches and what dropout dropped are Lightning's in each step. No weight is exported, no
name mapped. The exit code is 0 where all steps match.
"""

import sys

import numpy as np
import paddle
from paddle.nn import functional

from padiff_hapi import PaDiffCallback

DIM, DEPTH, HEADS, PATCH, SIZE, CLASSES, DROP = 32, 2, 4, 4, 16, 10, 0.1
ACCUMULATED = 2


class Attention(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (paddle.nn.Linear(DIM, DIM) for _ in range(3))
        self.out = paddle.nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (
            layer(x).reshape((0, 0, HEADS, DIM // HEADS)).transpose((0, 2, 1, 3))
            for layer in (self.query, self.key, self.value)
        )
        weights = functional.softmax(q.matmul(k, transpose_y=True) * (DIM // HEADS) ** -0.5)
        weights = functional.dropout(weights, DROP, training=self.training)
        return self.out(weights.matmul(v).transpose((0, 2, 1, 3)).flatten(2))


class Layer(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.attention, self.dropout = Attention(), paddle.nn.Dropout(DROP)
        self.ln_1, self.ln_2 = paddle.nn.LayerNorm(DIM), paddle.nn.LayerNorm(DIM)
        self.mlp = paddle.nn.Sequential(
            paddle.nn.Linear(DIM, 4 * DIM),
            paddle.nn.GELU(),
            paddle.nn.Dropout(DROP),
            paddle.nn.Linear(4 * DIM, DIM),
            paddle.nn.Dropout(DROP),
        )

    def forward(self, x):
        x = x + self.dropout(self.attention(self.ln_1(x)))
        return x + self.mlp(self.ln_2(x))


class ViT(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        start = paddle.nn.initializer.Normal(0.0, 0.02)
        self.embed = paddle.nn.Conv2D(3, DIM, PATCH, stride=PATCH)
        self.cls = self.create_parameter((1, 1, DIM), default_initializer=start)
        self.places = self.create_parameter((1, (SIZE // PATCH) ** 2 + 1, DIM), default_initializer=start)
        self.layers = paddle.nn.LayerList([Layer() for _ in range(DEPTH)])
        self.ln, self.classifier = paddle.nn.LayerNorm(DIM), paddle.nn.Linear(DIM, CLASSES)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose((0, 2, 1))
        x = paddle.concat([self.cls.expand((x.shape[0], -1, -1)), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.ln(x)[:, 0])


class Images(paddle.io.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        random = np.random.RandomState(index)
        return random.randn(3, SIZE, SIZE).astype("float32"), random.randint(CLASSES)


def loss(outputs, labels):
    # Lightning divides by the accumulated batches, paddle.Model does not.
    return functional.cross_entropy(outputs, labels) / ACCUMULATED


network = ViT()
optimizer = paddle.optimizer.AdamW(
    1e-3, parameters=network.parameters(), weight_decay=0.05, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)
)
model = paddle.Model(network)
model.prepare(optimizer, loss)
callback = PaDiffCallback(sys.argv[2], replay=sys.argv[1])
model.fit(Images(), batch_size=4, verbose=0, accumulate_grad_batches=ACCUMULATED, callbacks=[callback])
print(callback.report.text())
sys.exit(0 if callback.report.passed else 1)
