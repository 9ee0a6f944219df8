"""The candidate, where PaddlePaddle is and PyTorch is not: ``python replay_paddle.py FOLDER``.

Weights, moments, batches and the masks of dropout are the recorded ones, step by step. The fault: GELU is approximated.
"""

from __future__ import annotations

import sys

import paddle

import padiff

net = paddle.nn.Sequential(
    paddle.nn.Linear(16, 32), paddle.nn.Dropout(0.2), paddle.nn.GELU(approximate=True), paddle.nn.Linear(32, 4)
)
optimizer = paddle.optimizer.AdamW(1e-3, parameters=net.parameters())
folder = sys.argv[1]
with padiff.replay(f"{folder}/torch", net, f"{folder}/paddle", optimizer=optimizer, existing="overwrite") as replay:
    for step in replay:
        loss = paddle.nn.functional.cross_entropy(net(*step.inputs), *step.labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
assert "torch" not in sys.modules
print(replay.report.first_diff.message if replay.report.first_diff else "The runs match.")
