import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from kit import begin_torch, spoil, times
from torch import nn

FAULTS = ("weight", "scale", "loss", "lr")
begin_torch()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(hidden.mean(1) * times("scale"))


net = Net()
spoil("weight", net.embed.weight)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3 * times("lr"))
for _ in range(3):
    tokens, labels = torch.randint(0, 50, (8, 20)), torch.randint(0, 5, (8,))
    loss = nn.functional.cross_entropy(net(tokens), labels) * times("loss")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
