"""An actor and a critic on rollouts: advantages over time, a clipped objective. torch writes rows, paddle a list."""

from __future__ import annotations

import paddle
import paddle.nn.functional as P  # noqa: N812
import torch
import torch.nn.functional as T  # noqa: N812
from kit import Clean, Fault, Program, Recipe, Side
from loops import faults

STEPS, AGENTS, INPUTS, ACTIONS, WIDTH = 8, 4, 5, 3, 16


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(INPUTS, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        self.policy, self.value = torch.nn.Linear(WIDTH, ACTIONS), torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.policy(h), self.value(h).squeeze(-1)


class Candidate(paddle.nn.Layer):
    def __init__(self, fault, variant):
        super().__init__()
        self.fc1, self.fc2 = paddle.nn.Linear(INPUTS, WIDTH), paddle.nn.Linear(WIDTH, WIDTH)
        self.pi, self.v = paddle.nn.Linear(WIDTH, ACTIONS), paddle.nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = paddle.tanh(self.fc2(paddle.tanh(self.fc1(x))))
        return self.pi(x), self.v(x)[..., 0]


def loss_ours(outputs, batch, fault):
    logits, values = outputs
    with torch.no_grad():
        v, last = values.detach(), torch.zeros(AGENTS)
        advantages = torch.zeros(STEPS, AGENTS)
        for t in reversed(range(STEPS)):
            live = 1 - batch["dones"][t]
            last = batch["rewards"][t] + 0.99 * v[t + 1] * live - v[t] + 0.99 * 0.95 * live * last
            advantages[t] = last
        returns = advantages + v[:-1]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    chosen = T.log_softmax(logits[:-1], -1).gather(-1, batch["actions"][..., None]).squeeze(-1)
    ratio = torch.exp(chosen - batch["old"])
    objective = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return 0.25 * ((values[:-1] - returns) ** 2).mean() - objective


def loss_theirs(outputs, batch, fault):
    logits, values = outputs
    base = values if fault == "not_detached" else values.detach()
    gamma, lam = 0.9 if fault == "gamma" else 0.99, 1.0 if fault == "lambda" else 0.95
    rows, last = [], paddle.zeros([AGENTS])
    for t in range(STEPS - 1, -1, -1):
        live = 1.0 if fault == "ends_ignored" else 1.0 - batch["dones"][t]
        last = batch["rewards"][t] + gamma * base[t + 1] * live - base[t] + gamma * lam * live * last
        rows.insert(0, last)
    advantages = paddle.stack(rows)
    target = advantages + base[:-1]
    advantages = advantages.detach()
    if fault != "not_normalised":
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    logs = P.log_softmax(logits[:-1], -1)
    ratio = (paddle.take_along_axis(logs, batch["actions"].unsqueeze(-1), -1).squeeze(-1) - batch["old"]).exp()
    eps = 0.1 if fault == "clip_range" else 0.2
    objective = paddle.minimum(ratio * advantages, paddle.clip(ratio, 1 - eps, 1 + eps) * advantages)
    if fault == "unclipped":
        objective = ratio * advantages
    return (0.5 if fault == "value_weight" else 0.25) * P.mse_loss(values[:-1], target) - objective.mean()


def data(rng, n):
    return [
        {
            "x": rng.standard_normal((STEPS + 1, AGENTS, INPUTS)).astype("float32"),
            "actions": rng.integers(0, ACTIONS, (STEPS, AGENTS)),
            "rewards": rng.standard_normal((STEPS, AGENTS)).astype("float32"),
            "dones": (rng.random((STEPS, AGENTS)) < 0.15).astype("float32"),
            "old": (-1.1 + 0.2 * rng.standard_normal((STEPS, AGENTS))).astype("float32"),
        }
        for _ in range(n)
    ]


def names(name):
    plain = {"fc1": "body.0", "fc2": "body.2", "pi": "policy", "v": "value"}
    layer, _, slot = name.partition(".")
    return f"{plain[layer]}.{slot}"


RECIPE = Recipe("adam", 3e-3, eps=1e-5)

PROGRAM = Program(
    "returns",
    Side("torch", lambda fault, variant: Reference(), loss_ours),
    Side("paddle", Candidate, loss_theirs, names),
    RECIPE,
    data,
    ("x",),
    faults=(
        Fault("gamma", "loss|backward", "", "gamma|discount", (r"0\.9 for the reference's 0\.99",)),
        Fault("lambda", "loss|backward", "", "lambda", (r"0\.99 for the reference's 0\.94",)),
        Fault("ends_ignored", "loss|backward", "", "mask", (r"mask", r"zeros and ones .* not used")),
        Fault("not_normalised", "loss|backward", "", "normal", (r"normal", r"std\(\)", r"deviation")),
        Fault("clip_range", "loss|backward", "", "clamp|clip", (r"low is 0\.9", r"clamp")),
        Fault("unclipped", "loss|backward", "", "clamp|choice|clip", (r"clamp|clip", r"alone, .* the smaller")),
        Fault("value_weight", "loss", "", "loss_term_weight", (r"weight of a term",)),
        Fault("not_detached", "backward|grad", "", "detach", (r"detach",)),
        *faults(RECIPE, "adam_eps", "rate", "clip_added"),
    ),
    clean=(Clean("twin"), Clean("other_seed", seed=2)),
)  # fmt: skip
