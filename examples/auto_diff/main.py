"""One forward and backward of two models, without a training: are these the same model?

    python main.py

The fault: the port's attention has another number of heads.
"""

from __future__ import annotations

import numpy as np
import paddle
import torch

import padiff


def main() -> None:
    torch.manual_seed(0)
    reference = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    candidate = paddle.nn.TransformerEncoderLayer(32, 8, 64, dropout=0.0)
    inputs = np.random.default_rng(0).normal(size=(2, 6, 32)).astype(np.float32)
    padiff.auto_diff(reference, candidate, (torch.from_numpy(inputs), paddle.to_tensor(inputs)))


if __name__ == "__main__":
    main()
