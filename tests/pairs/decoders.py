"""Decoders: GPT-2 with its Conv1D, NeoX with interleaved heads, tied and untied heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kit.frameworks import PADDLE, TORCH
from kit.nets import attend

from .copying import interleave, part_heads, put, split, value
from .pair import links, pair, straight, tokens

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH = 16, 4, 16, 13, 6
IDS = (tokens(2, LENGTH, vocabulary=VOCABULARY),)


def gpt2(kit, tied="module"):
    """Hugging Face's GPT-2: Conv1D with (in, out), square in the MLP; ``lm_head`` is tied, or equal but for itself."""

    class Conv1D(kit.Net):
        def build(self, outputs, inputs):
            self.nf = outputs
            self.weight, self.bias = kit.param(inputs, outputs), kit.param(outputs)

        def forward(self, x):
            return x @ self.weight + self.bias

    class GPT2Attention(kit.Net):
        def build(self):
            self.num_heads = HEADS
            self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
            self.attn_dropout = kit.Dropout(0.1)

        def forward(self, x):
            qkv = self.c_attn(x)
            q, k, v = (qkv[:, :, part * WIDTH : (part + 1) * WIDTH] for part in range(3))
            return self.c_proj(attend(kit, q, k, v, HEADS, causal=True))

    class GPT2MLP(kit.Net):
        def build(self):
            self.c_fc, self.c_proj = Conv1D(HIDDEN, WIDTH), Conv1D(WIDTH, HIDDEN)

        def forward(self, x):
            return self.c_proj(kit.gelu(self.c_fc(x), True))

    class GPT2Block(kit.Net):
        def build(self):
            self.ln_1, self.attn = kit.layernorm(WIDTH), GPT2Attention()
            self.ln_2, self.mlp = kit.layernorm(WIDTH), GPT2MLP()

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class GPT2Model(kit.Net):
        def build(self):
            self.wte, self.wpe = kit.embedding(VOCABULARY, WIDTH), kit.embedding(LENGTH, WIDTH)
            self.drop = kit.Dropout(0.1)
            self.h = kit.List([GPT2Block(), GPT2Block()])
            self.ln_f = kit.layernorm(WIDTH)

        def forward(self, ids):
            x = self.drop(self.wte(ids) + self.wpe(kit.tensor(range(LENGTH), None)))
            for block in self.h:
                x = block(x)
            return self.ln_f(x)

    class GPT2LMHeadModel(kit.Net):
        def build(self):
            self.transformer = GPT2Model()
            if tied == "module":
                self.lm_head = Head()
                self.lm_head.weight = self.transformer.wte.weight
            else:
                self.lm_head = kit.linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, ids):
            return self.lm_head(self.transformer(ids))

    class Head(kit.Layer):
        def forward(self, x):
            return x @ kit.permute(self.weight, (1, 0))

    return GPT2LMHeadModel()


def gpt(kit, attention="fused", tied="call"):
    """Plain Linear layers; the head is the embedding's matrix used again, or a tied layer; blocks defined last."""

    class Attention(kit.Net):
        def build(self):
            self.num_heads = HEADS
            self.dense = kit.linear(WIDTH, WIDTH)
            if attention == "split":
                self.wv, self.wk = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, WIDTH)
                self.wq = kit.linear(WIDTH, WIDTH)
            else:
                self.query_key_value = kit.linear(WIDTH, 3 * WIDTH)

        def parts(self, x):
            if attention == "split":
                return self.wq(x), self.wk(x), self.wv(x)
            mixed, lead = self.query_key_value(x), (x.shape[0], x.shape[1])
            if attention == "fused":
                return [mixed[:, :, part * WIDTH : (part + 1) * WIDTH] for part in range(3)]
            mixed = mixed.reshape((*lead, HEADS, 3, WIDTH // HEADS))
            return [mixed[:, :, :, part].reshape((*lead, WIDTH)) for part in range(3)]

        def forward(self, x):
            return self.dense(attend(kit, *self.parts(x), HEADS, causal=True))

    class Block(kit.Net):
        def build(self):
            self.mlp = kit.named(dense_h_to_4h=kit.linear(WIDTH, HIDDEN), act=Gelu(), out=kit.linear(HIDDEN, WIDTH))
            self.attention = Attention()
            self.input_layernorm, self.post_attention_layernorm = kit.layernorm(WIDTH), kit.layernorm(WIDTH)

        def forward(self, x):
            x = x + self.attention(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class Gelu(kit.Layer):
        def forward(self, x):
            return kit.gelu(x, True)

    class Head(kit.Layer):
        def forward(self, x):
            return x @ kit.permute(self.weight, (1, 0))

    class GPT(kit.Net):
        def build(self):
            if tied == "module":
                self.embed_out = Head()
            self.final_norm = kit.layernorm(WIDTH)
            self.embed_in, self.positions = kit.embedding(VOCABULARY, WIDTH), kit.embedding(LENGTH, WIDTH)
            if tied == "module":
                self.embed_out.weight = self.embed_in.weight
            if tied == "untied":
                self.embed_out = kit.linear(WIDTH, VOCABULARY, bias=False)
            self.layers = kit.Sequential(Block(), Block())

        def forward(self, ids):
            x = self.final_norm(self.layers(self.embed_in(ids) + self.positions(kit.tensor(range(LENGTH), None))))
            if tied == "call":
                return x @ kit.permute(self.embed_in.weight, (1, 0))
            return self.embed_out(x)

    return GPT()


BODY = """
    transformer.wte                 embed_in
    transformer.wpe                 positions
    transformer.h.{i}.ln_1          layers.{i}.input_layernorm
    transformer.h.{i}.attn.c_proj   layers.{i}.attention.dense
    transformer.h.{i}.ln_2          layers.{i}.post_attention_layernorm
    transformer.h.{i}.mlp.c_fc      layers.{i}.mlp.dense_h_to_4h
    transformer.h.{i}.mlp.c_proj    layers.{i}.mlp.out
    transformer.ln_f                final_norm
    """
FUSED = "\n transformer.h.{i}.attn.c_attn layers.{i}.attention.query_key_value"
SPLIT = "".join(f"\n transformer.h.{{i}}.attn.c_attn layers.{{i}}.attention.w{name}" for name in "qkv")
TIED_MODULE, TIED_CALL = "\n lm_head embed_out", "\n lm_head embed_in"
OWN = """
    embed_in          embed_in
    positions         positions
    final_norm        final_norm
    embed_out         embed_out
    layers.{i}.input_layernorm            layers.{i}.input_layernorm
    layers.{i}.post_attention_layernorm   layers.{i}.post_attention_layernorm
    layers.{i}.attention.dense            layers.{i}.attention.dense
    layers.{i}.mlp.dense_h_to_4h          layers.{i}.mlp.dense_h_to_4h
    layers.{i}.mlp.out                    layers.{i}.mlp.out
    """
SPLIT_TO_NEOX = "".join(f"\n layers.{{i}}.attention.w{name} layers.{{i}}.attention.query_key_value" for name in "qkv")
NEOX_TO_SPLIT = "".join(f"\n layers.{{i}}.attention.query_key_value layers.{{i}}.attention.w{name}" for name in "qkv")


def carry_split(ref, cand):
    straight(links(BODY))(ref, cand)
    for index in (0, 1):
        parts = [f"layers.{index}.attention.w{name}" for name in "qkv"]
        split(ref, f"transformer.h.{index}.attn.c_attn", cand, parts)


def carry_to_interleaved(ref, cand):
    straight(links(OWN))(ref, cand)
    for index in (0, 1):
        parts = [f"layers.{index}.attention.w{name}" for name in "qkv"]
        interleave(ref, parts, cand, f"layers.{index}.attention.query_key_value", HEADS)


def carry_from_interleaved(ref, cand):
    straight(links(OWN))(ref, cand)
    for index in (0, 1):
        parts = [f"layers.{index}.attention.w{name}" for name in "qkv"]
        part_heads(ref, f"layers.{index}.attention.query_key_value", cand, parts, HEADS)


def equal_heads(given):
    """The pair with the reference's untied head set to its embedding's values."""

    def build():
        reference, candidate = given.build()
        put(reference, "lm_head", "weight", value(reference, "transformer.wte", "weight"))
        return reference, candidate

    return replace(given, build=build)


PAIRS = (
    # Conv1D with (in, out), square ones too, against Linear; heads tied on both sides, as layers.
    pair(
        "gpt2_conv1d",
        gpt2,
        partial(gpt, tied="module"),
        IDS,
        links(BODY + FUSED + TIED_MODULE),
        straight(links(BODY + FUSED)),
    ),
    # Conv1D c_attn against separate wq, wk, wv in another order; the candidate's head is the embedding used again.
    pair(
        "gpt2_split_and_tied_by_call",
        gpt2,
        partial(gpt, attention="split"),
        IDS,
        links(BODY + SPLIT + TIED_CALL),
        carry_split,
    ),
    # The reference's head is a layer of its own with the embedding's values; the candidate's is tied. In torch.
    equal_heads(
        pair(
            "gpt2_untied_but_equal",
            partial(gpt2, tied="equal"),
            partial(gpt, tied="module"),
            IDS,
            links(BODY + FUSED + TIED_MODULE),
            straight(links(BODY + FUSED)),
            (TORCH, TORCH),
        )
    ),
    # Separate q, k, v into NeoX's interleaved query_key_value; heads untied on both sides.
    pair(
        "neox_split_to_interleaved",
        partial(gpt, attention="split", tied="untied"),
        partial(gpt, attention="interleaved", tied="untied"),
        IDS,
        links(OWN + SPLIT_TO_NEOX),
        carry_to_interleaved,
    ),
    # And back, from paddle to torch.
    pair(
        "neox_interleaved_to_split",
        partial(gpt, attention="interleaved", tied="untied"),
        partial(gpt, attention="split", tied="untied"),
        IDS,
        links(OWN + NEOX_TO_SPLIT),
        carry_from_interleaved,
        (PADDLE, TORCH),
    ),
)
