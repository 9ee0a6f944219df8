"""Translators whose attention is fused on one side only: the clean pair matches, replayed in either framework.

Where the MLP is as wide as query, key and value in one, or as wide as one of them, shapes tell none of these apart.
"""

from __future__ import annotations

import numpy as np
import pytest
from kit.frameworks import PADDLE, TORCH
from kit.nets import attend

import padiff

WIDTH, HEADS, WORDS = 8, 2, 12


def named(q, k, v, o, feed, norms):
    return {"q": q, "k": k, "v": v, "o": o, "ff": feed, "norms": norms}


PLAIN = named("query", "key", "value", "out", ("ff1", "ff2"), ("norm1", "norm2", "norm3"))
TERSE = named("w1", "w2", "w3", "w4", ("up", "low"), ("norm_a", "norm_cross", "norm_b"))
# `ln_f` is what many call the last one of a model.
OTHER = named("q_proj", "k_proj", "v_proj", "o_proj", ("fc1", "fc2"), ("ln_a", "ln_b", "ln_f"))


def rows(kit, weight, number):
    part = slice(number * WIDTH, (number + 1) * WIDTH)
    if len(weight.shape) == 1:
        return weight[part]
    return kit.permute(weight, (1, 0))[:, part] if kit is TORCH else weight[:, part]


def attention(kit, style, names):
    """Attention whose projections are ``apart``, in a fused ``layer``, or in a fused ``parameter`` of its own."""

    class Attention(kit.Net):
        def build(self):
            if style == "apart":
                for part in "qkv":
                    setattr(self, names[part], kit.linear(WIDTH, WIDTH))
            elif style == "layer":
                self.qkv = kit.linear(WIDTH, 3 * WIDTH)
            else:
                shape = (3 * WIDTH, WIDTH) if kit is TORCH else (WIDTH, 3 * WIDTH)
                self.in_proj_weight, self.in_proj_bias = kit.param(*shape), kit.param(3 * WIDTH)
            setattr(self, names["o"], kit.linear(WIDTH, WIDTH))

        def forward(self, x, source, causal):
            if style == "apart":
                q, k, v = (getattr(self, names[part])(y) for part, y in zip("qkv", (x, source, source)))
            else:
                of = (self.qkv.weight, self.qkv.bias) if style == "layer" else (self.in_proj_weight, self.in_proj_bias)
                q, k, v = (y @ rows(kit, of[0], n) + rows(kit, of[1], n) for n, y in enumerate((x, source, source)))
            return getattr(self, names["o"])(attend(kit, q, k, v, HEADS, causal))

    return Attention


def translator(kit, style, cross, names, wide, tied):
    """An encoder and a decoder of one block each."""
    first, second = names["ff"]
    one, two, three = names["norms"]

    class Block(kit.Net):
        def build(self, decodes):
            self.decodes = decodes
            self.attention = attention(kit, style, names)()
            setattr(self, one, kit.layernorm(WIDTH))
            if decodes:
                self.cross = attention(kit, cross, names)()
                setattr(self, two, kit.layernorm(WIDTH))
            setattr(self, three, kit.layernorm(WIDTH))
            setattr(self, first, kit.linear(WIDTH, wide))
            setattr(self, second, kit.linear(wide, WIDTH))

        def forward(self, x, source=None):
            x = getattr(self, one)(x + self.attention(x, x, self.decodes))
            if self.decodes:
                x = getattr(self, two)(x + self.cross(x, source, False))
            return getattr(self, three)(x + getattr(self, second)(kit.relu(getattr(self, first)(x))))

    class Translator(kit.Net):
        def build(self):
            self.words = kit.embedding(WORDS, WIDTH)
            self.encoder, self.decoder = Block(False), Block(True)
            if not tied:
                self.head = kit.linear(WIDTH, WORDS)

        def forward(self, source, target):
            found = self.decoder(self.words(target), self.encoder(self.words(source)))
            return found @ kit.permute(self.words.weight, (1, 0)) if tied else self.head(found)

    net = Translator()
    random = np.random.default_rng(0)
    for parameter in net.parameters():
        if len(parameter.shape) != 1 or float(kit.numpy(parameter).std()) == 0:
            kit.set(parameter, random.normal(0, 0.4, tuple(parameter.shape)).astype("float32"))
    return net


def loss(kit, net, source, target, labels):
    return kit.cross_entropy(net(source, target).reshape((-1, WORDS)), labels.reshape((-1,)))


def batch(kit, step):
    random = np.random.default_rng(step)
    return [kit.tensor(random.integers(0, WORDS, (3, length)), "int64") for length in (6, 5, 5)]


PAIRS = {
    "a parameter": (("parameter", "parameter", PLAIN), ("apart", "apart", OTHER)),
    "a layer": (("apart", "apart", PLAIN), ("layer", "layer", PLAIN)),
    "across only": (("layer", "apart", OTHER), ("apart", "parameter", PLAIN)),
    "names that mislead": (("apart", "apart", TERSE), ("parameter", "parameter", OTHER)),
}


@pytest.mark.parametrize(
    ("pair", "tied", "back"), [(pair, (k + back) % 2, back) for k, pair in enumerate(PAIRS) for back in (0, 1)]
)
def test_a_clean_pair_matches(pair, tied, back, tmp_path):
    """Any two of pair, width and direction together."""
    wide = WIDTH if tied else 3 * WIDTH
    there, here = (PADDLE, TORCH) if back else (TORCH, PADDLE)
    nets = {kit: translator(kit, *of, wide, tied) for kit, of in zip((TORCH, PADDLE), PAIRS[pair])}
    optimizer = there.sgd(nets[there].parameters())
    with padiff.record(nets[there], tmp_path / "there", optimizer=optimizer, replay_every_n_steps=2) as rec:
        for step in range(3):
            loss(there, nets[there], *batch(there, step)).backward()
            optimizer.step()
            there.zero(optimizer)
            rec.try_dump()
    optimizer = here.sgd(nets[here].parameters())
    with padiff.replay(tmp_path / "there", nets[here], tmp_path / "here", optimizer=optimizer) as replay:
        for step in replay:
            loss(here, nets[here], *step.inputs, *step.labels).backward()
            optimizer.step()
            here.zero(optimizer)
    assert replay.report.passed, str(replay.report)
    assert replay.report.coverage.steps == (0, 2)
