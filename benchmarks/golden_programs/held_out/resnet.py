import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from kit import begin_torch, spoil, times
from torch import nn

FAULTS = ("weight", "branch", "bn_momentum", "smoothing")
begin_torch()


class Block(nn.Module):
    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside, momentum=0.1 * times("bn_momentum"))
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.gn2 = nn.GroupNorm(4, outside)
        self.short = nn.Conv2d(inside, outside, 1, stride) if inside != outside else nn.Identity()

    def forward(self, x):
        out = self.gn2(self.conv2(torch.nn.functional.silu(self.bn1(self.conv1(x)))))
        return torch.relu(out * times("branch") + self.short(x))


net = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), Block(16, 16), Block(16, 32, 2), Block(32, 48, 2))
net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 8)])
spoil("weight", net[2].conv1.weight)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1 * times("smoothing"))
for _ in range(3):
    images, labels = torch.randn(8, 3, 20, 20), torch.randint(0, 8, (8,))
    optimizer.zero_grad()
    criterion(net(images), labels).backward()
    optimizer.step()
