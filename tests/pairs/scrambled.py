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


def scrambled_letters(kit):
    return chain(kit, "l1 l2 l3 l4", "l3 l1 l4 l2")


def misleading(kit):
    """The same names as the other side's, which run in another order."""
    return chain(kit, "a b c d", "b d a c")


def convs(kit):
    return chain(kit, "x y z", "x y z", lambda: kit.conv(3, 3, 3, padding=1), kit.relu)


def scrambled_convs(kit):
    return chain(kit, "p q r", "r p q", lambda: kit.conv(3, 3, 3, padding=1), kit.relu)


def block_chain(kit, defined, run, names):
    """Whole transformer blocks with meaningless names, inside and out."""
    attention, out, norm1, up, down, norm2 = names.split()

    class Block(kit.Net):
        def build(self):
            for name in sorted(names.split()):
                made = kit.layernorm(WIDTH) if name in (norm1, norm2) else kit.linear(WIDTH, WIDTH)
                setattr(self, name, made)

        def forward(self, x):
            y = getattr(self, norm1)(x)
            mixed = getattr(self, attention)(y)
            x = x + getattr(self, out)(attend(kit, mixed, y, y, 2))
            return x + getattr(self, down)(kit.relu(getattr(self, up)(getattr(self, norm2)(x))))

    return chain(kit, defined, run, Block, lambda x: x)


def blocks_in_order(kit):
    return block_chain(kit, "u v w", "u v w", "f1 f2 n1 f3 f4 n2")


def scrambled_blocks(kit):
    return block_chain(kit, "m1 m2 m3", "m2 m3 m1", "t5 t2 t6 t1 t4 t3")


SCRAMBLED_BLOCKS = links(
    "".join(
        f"\n {reference}.{inner} {candidate}.{other}"
        for reference, candidate in (("u", "m2"), ("v", "m3"), ("w", "m1"))
        for inner, other in (("n1", "t6"), ("f1", "t5"), ("f2", "t2"), ("n2", "t3"), ("f3", "t1"), ("f4", "t4"))
    )
)


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
    # Meaningless names, another order of definition: only running tells.
    pair(
        "letters_scrambled",
        letters,
        scrambled_letters,
        VECTORS,
        links("a l3\n b l1\n c l4\n d l2"),
        evidence="execution",
    ),
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
    # Blocks of six layers: the blocks are scrambled, and the layers inside them, too.
    pair("blocks_scrambled", blocks_in_order, scrambled_blocks, ROWS, SCRAMBLED_BLOCKS, evidence="execution"),
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
