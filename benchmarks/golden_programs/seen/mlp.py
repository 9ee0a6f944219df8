import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from kit import begin_torch, spoil, times
from torch import nn

FAULTS = ("weight", "constant", "momentum", "decay")
begin_torch()


class Gelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * times("constant") * x**3)))


class Heavy(torch.optim.Optimizer):
    """SGD with momentum and decay, as somebody writes it by hand."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                speed = state.get("speed", torch.zeros_like(weight))
                state["speed"] = speed * (0.9 * times("momentum")) + weight.grad + weight * (0.01 * times("decay"))
                weight -= group["lr"] * state["speed"]


net = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), Gelu(), nn.Linear(64, 64), nn.LayerNorm(64), Gelu())
net.append(nn.Linear(64, 3))
spoil("weight", net[3].weight)
optimizer = Heavy(net.parameters())
for _ in range(3):
    x, y = torch.randn(32, 20), torch.randn(32, 3)
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
