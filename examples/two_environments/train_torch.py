"""The reference, where PyTorch is: ``python train_torch.py FOLDER``. Every 5th step keeps a pack, to be done again."""

from __future__ import annotations

import sys

import torch

import padiff

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
with padiff.record(
    net, f"{sys.argv[1]}/torch", optimizer=optimizer, every_n_steps=5, replay_every_n_steps=5, existing="overwrite"
) as rec:
    for _ in range(11):
        loss = torch.nn.functional.cross_entropy(net(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rec.try_dump()
