"""Planted bisections of `benchmarks/bisections.py`: what is planted is what has to be found.

A change is a setting, or ``code:NAME`` for a constant in the training's code. The held-out third is not to be run while
the code that it judges is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A bisection.

    Attributes:
        kind: ``commits``, ``versions`` or ``config``.
        net: the training.
        count: number of commits or versions after the first one, or of keys that differ.
        planted: the changes, by the number of the commit, version or key that makes them.
        broken: numbers of commits or versions that do not run.
    """

    kind: str
    net: str
    count: int
    planted: dict[int, dict[str, Any]]
    broken: tuple[int, ...] = ()


SEEN = [
    Case("commits", "conv", 8, {3: {"bn_momentum": 0.9}}),
    Case("commits", "gpt", 16, {11: {"code:gelu": "tanh"}}),
    Case("commits", "lstm", 30, {1: {"lr": 0.02}}),
    Case("commits", "conv", 24, {24: {"code:pool": "avg"}}, broken=(5, 12)),
    Case("commits", "gpt", 12, {4: {"beta2": 0.99}, 9: {"code:shift": False}}),
    Case("commits", "lstm", 20, {6: {"warmup": 5}, 14: {"smoothing": 0.1}}),
    Case("versions", "gpt", 9, {5: {"code:causal": False}}),
    Case("versions", "conv", 14, {2: {"decay": 0.3}, 10: {"padding": "circular"}}),
    Case("config", "lstm", 12, {7: {"eps": 0.01}}),
    Case("config", "conv", 12, {0: {"optimizer": "sgd"}}),
    Case("config", "gpt", 12, {3: {"dropout": 0.2}, 8: {"lr": 0.003}}),
    Case("config", "conv", 12, {2: {"clip": 0.01}, 9: {"clip_from": 4}}),
    Case("config", "lstm", 12, {1: {"seed": 5}, 10: {"data_seed": 9}}),
    Case("config", "gpt", 12, {5: {"optimizer": "sgd"}, 6: {"momentum": 0.0}}),
]
HELD_OUT = [
    Case("commits", "gpt", 28, {17: {"clip": 0.05}}, broken=(14, 15)),
    Case("commits", "conv", 18, {3: {"zero_every": 3}, 13: {"eps": 0.001}}),
    Case("versions", "lstm", 11, {7: {"code:last": False}}, broken=(6,)),
    Case("config", "conv", 12, {11: {"reduction": "sum"}}),
    Case("config", "lstm", 12, {4: {"bias": False}, 5: {"accumulate": 2}}),
    Case("config", "conv", 12, {0: {"dropout": 0.3}, 6: {"init_std": 0.5}}),
]
