"""Models whose names and order of definition tell nothing, or mislead: only the order in which layers run tells."""

from __future__ import annotations

from kit.frameworks import PADDLE, TORCH
from kit.nets import attend

from .pair import links, normal, pair

WIDTH = 8
VECTORS = (normal(3, WIDTH),)
ROWS = (normal(2, 4, WIDTH),)


def chain(kit, defined, run, make=None, act=None):
    """Layers of the same shape with meaningless names: in which order they are defined, and in which they run."""
    make = make or (lambda: kit.linear(WIDTH, WIDTH))
    act = act or kit.tanh

    class Chain(kit.Net):
        def build(self):
            for name in defined.split():
                setattr(self, name, make())

        def forward(self, x):
            for name in run.split():
                x = act(getattr(self, name)(x))
            return x

    return Chain()


def letters(kit):
    return chain(kit, "a b c d", "a b c d")


def misleading(kit):
    """The same names as the other side's, which run in another order."""
    return chain(kit, "a b c d", "b d a c")


def convs(kit):
    return chain(kit, "x y z", "x y z", lambda: kit.conv(3, 3, 3, padding=1), kit.relu)


def scrambled_convs(kit):
    return chain(kit, "p q r", "r p q", lambda: kit.conv(3, 3, 3, padding=1), kit.relu)


def attention_by_letters(kit, order):
    """Attention whose projections have meaningless names; reported by role: query, key, value, output."""
    q, k, v, o = order.split()

    class Attention(kit.Net):
        def build(self):
            for name in sorted(order.split()):
                setattr(self, name, kit.linear(WIDTH, WIDTH))

        def forward(self, x):
            query, key = getattr(self, q)(x), getattr(self, k)(x)
            return getattr(self, o)(attend(kit, query, key, getattr(self, v)(x), 2))

    return Attention()


def attention_in_order(kit):
    return attention_by_letters(kit, "p1 p2 p3 p4")


def attention_scrambled(kit):
    return attention_by_letters(kit, "s4 s2 s1 s3")


PAIRS = (
    # The same names on both sides, and they mislead.
    pair("letters_mislead", letters, misleading, VECTORS, links("a b\n b d\n c a\n d c"), evidence="execution"),
    # Convolutions of the same shape, torch against torch.
    pair(
        "convs_scrambled",
        convs,
        scrambled_convs,
        (normal(2, 3, 6, 6),),
        links("x r\n y p\n z q"),
        kits=(TORCH, TORCH),
        evidence="execution",
    ),
    # Query, key, value and output by number, another number on the other side; paddle against torch.
    pair(
        "attention_scrambled",
        attention_in_order,
        attention_scrambled,
        ROWS,
        links("p1 s4\n p2 s2\n p3 s1\n p4 s3"),
        kits=(PADDLE, TORCH),
        evidence="execution",
    ),
)
