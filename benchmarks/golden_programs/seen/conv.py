import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from kit import begin_torch, spoil, times
from torch import nn

FAULTS = ("weight", "scale", "lr", "constant")
begin_torch()


class Block(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))) * times("scale")


net = nn.Sequential(Block(3, 16), Block(16, 32), nn.MaxPool2d(2), Block(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten())
net.append(nn.Linear(32, 10))
spoil("weight", net[1].conv.weight)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * times("lr"), momentum=0.9, weight_decay=5e-4)
for _ in range(3):
    images, labels = torch.rand(16, 3, 16, 16), torch.randint(0, 10, (16,))
    loss = nn.functional.cross_entropy(net((images - 0.5 * times("constant")) / 0.25), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
