"""The training of today against the one that was recorded when this test was written.

pytest                   compares
pytest --padiff-update   records the golden run anew, where a change is meant
"""

from __future__ import annotations

import torch


def test_training(padiff):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    with padiff.golden("net", net, optimizer=optimizer) as rec:
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(net(torch.randn(8, 8)), torch.randint(0, 4, (8,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
