import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from kit import begin_torch, spoil, times
from torch import nn

FAULTS = ("weight", "norm", "gate", "beta2")
begin_torch()


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.gain * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * times("norm")


class Gated(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y) * times("gate")) * self.up(y))


class OwnAdam(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        beta1, beta2 = 0.9, 0.95 * times("beta2")
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            mean = state["mean"] = state.get("mean", 0) * beta1 + (1 - beta1) * weight.grad
            square = state["square"] = state.get("square", 0) * beta2 + (1 - beta2) * weight.grad**2
            step = mean / (1 - beta1**self.count) / ((square / (1 - beta2**self.count)).sqrt() + 1e-8)
            weight.sub_(step * self.param_groups[0]["lr"])


net = nn.Sequential(nn.Linear(12, 40), Gated(40, 80), Gated(40, 80), RMSNorm(40), nn.Linear(40, 4))
spoil("weight", net[2].up.weight)
optimizer = OwnAdam(net.parameters())
for _ in range(3):
    x = torch.randn(24, 12)
    loss = nn.functional.smooth_l1_loss(net(x), torch.stack([x.sum(-1), x[:, 0], x[:, 1].sin(), x[:, 2] ** 2], -1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
