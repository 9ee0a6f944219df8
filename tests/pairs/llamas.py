"""Llama in several hands, and experts."""

from __future__ import annotations

from kit.nets import attend

from .copying import fuse
from .pair import links, pair, straight, tokens

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH = 16, 2, 24, 11, 5
IDS = (tokens(2, LENGTH, vocabulary=VOCABULARY),)


def rms_norm(kit, name):
    """An RMSNorm class whose only parameter has this name."""

    class RMSNorm(kit.Net):
        def build(self, width):
            setattr(self, name, kit.param(width))

        def forward(self, x):
            return x / kit.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * getattr(self, name)

    return RMSNorm


def llama(kit, experts=0):
    """Hugging Face's names; with ``experts``, an expert layer as in Mixtral instead of each MLP."""
    norm = rms_norm(kit, "weight")

    class LlamaAttention(kit.Net):
        def build(self):
            for name in "qkvo":
                setattr(self, f"{name}_proj", kit.linear(WIDTH, WIDTH, bias=False))

        def forward(self, x):
            return self.o_proj(attend(kit, self.q_proj(x), self.k_proj(x), self.v_proj(x), HEADS, causal=True))

    class LlamaMLP(kit.Net):
        def build(self):
            self.gate_proj, self.up_proj = (kit.linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
            self.down_proj = kit.linear(HIDDEN, WIDTH, bias=False)
            self.act_fn = kit.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    class Experts(kit.Net):
        def build(self):
            self.gate = kit.linear(WIDTH, experts, bias=False)
            self.experts = kit.List([LlamaMLP() for _ in range(experts)])

        def forward(self, x):
            share = kit.softmax(self.gate(x))
            return sum(share[:, :, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))

    class LlamaDecoderLayer(kit.Net):
        def build(self):
            self.self_attn = LlamaAttention()
            self.mlp = Experts() if experts else LlamaMLP()
            self.input_layernorm, self.post_attention_layernorm = norm(WIDTH), norm(WIDTH)

        def forward(self, x):
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class LlamaModel(kit.Net):
        def build(self):
            self.embed_tokens = kit.embedding(VOCABULARY, WIDTH)
            self.layers = kit.List([LlamaDecoderLayer(), LlamaDecoderLayer()])
            self.norm = norm(WIDTH)

        def forward(self, ids):
            x = self.embed_tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    class LlamaForCausalLM(kit.Net):
        def build(self):
            self.model = LlamaModel()
            self.lm_head = kit.linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, ids):
            return self.lm_head(self.model(ids))

    return LlamaForCausalLM()


def meta_llama(kit, fused=False, experts=0):
    """Meta's names, all in another order; fused: key and value in one, gate and up in one."""
    norm = rms_norm(kit, "scale")

    class Attention(kit.Net):
        def build(self):
            self.wo = kit.linear(WIDTH, WIDTH, bias=False)
            if fused:
                self.wkv = kit.linear(WIDTH, 2 * WIDTH, bias=False)
            else:
                self.wv, self.wk = (kit.linear(WIDTH, WIDTH, bias=False) for _ in range(2))
            self.wq = kit.linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            if fused:
                both = self.wkv(x)
                k, v = both[:, :, :WIDTH], both[:, :, WIDTH:]
            else:
                k, v = self.wk(x), self.wv(x)
            return self.wo(attend(kit, self.wq(x), k, v, HEADS, causal=True))

    class FeedForward(kit.Net):
        def build(self):
            if fused:
                self.gate_up_proj = kit.linear(WIDTH, 2 * HIDDEN, bias=False)
                self.down_proj = kit.linear(HIDDEN, WIDTH, bias=False)
            else:
                self.w1 = kit.linear(WIDTH, HIDDEN, bias=False)
                self.w2 = kit.linear(HIDDEN, WIDTH, bias=False)
                self.w3 = kit.linear(WIDTH, HIDDEN, bias=False)

        def forward(self, x):
            if fused:
                both = self.gate_up_proj(x)
                return self.down_proj(kit.silu(both[:, :, :HIDDEN]) * both[:, :, HIDDEN:])
            return self.w2(kit.silu(self.w1(x)) * self.w3(x))

    class Mixture(kit.Net):
        def build(self):
            self.ffns = kit.Dict({f"expert_{i}": FeedForward() for i in range(experts)})
            self.router = kit.linear(WIDTH, experts, bias=False)

        def forward(self, x):
            share = kit.softmax(self.router(x))
            return sum(share[:, :, i : i + 1] * self.ffns[f"expert_{i}"](x) for i in range(experts))

    class TransformerBlock(kit.Net):
        def build(self):
            self.ffn_norm, self.attention_norm = norm(WIDTH), norm(WIDTH)
            self.feed_forward = Mixture() if experts else FeedForward()
            self.attention = Attention()

        def forward(self, x):
            x = x + self.attention(self.attention_norm(x))
            return x + self.feed_forward(self.ffn_norm(x))

    class Transformer(kit.Net):
        def build(self):
            self.output = kit.linear(WIDTH, VOCABULARY, bias=False)
            self.tok_embeddings = kit.embedding(VOCABULARY, WIDTH)
            self.norm = norm(WIDTH)
            self.layers = kit.List([TransformerBlock(), TransformerBlock()])

        def forward(self, ids):
            x = self.tok_embeddings(ids)
            for layer in self.layers:
                x = layer(x)
            return self.output(self.norm(x))

    return Transformer()


def with_experts(kit):
    return llama(kit, experts=3)


def with_routed_ffns(kit):
    return meta_llama(kit, experts=3)


def with_fused(kit):
    return meta_llama(kit, fused=True)


BODY = """
    model.embed_tokens                        tok_embeddings
    model.norm                                norm
    lm_head                                   output
    model.layers.{i}.input_layernorm          layers.{i}.attention_norm
    model.layers.{i}.self_attn.q_proj         layers.{i}.attention.wq
    model.layers.{i}.self_attn.o_proj         layers.{i}.attention.wo
    model.layers.{i}.post_attention_layernorm layers.{i}.ffn_norm
    """
KEY_AND_VALUE = """
    model.layers.{i}.self_attn.k_proj         layers.{i}.attention.wk
    model.layers.{i}.self_attn.v_proj         layers.{i}.attention.wv
    """
MLP = """
    model.layers.{i}.mlp.gate_proj            layers.{i}.feed_forward.w1
    model.layers.{i}.mlp.up_proj              layers.{i}.feed_forward.w3
    model.layers.{i}.mlp.down_proj            layers.{i}.feed_forward.w2
    """
DOWN = "\n model.layers.{i}.mlp.down_proj layers.{i}.feed_forward.down_proj"
FUSED = """
    model.layers.{i}.self_attn.k_proj         layers.{i}.attention.wkv
    model.layers.{i}.self_attn.v_proj         layers.{i}.attention.wkv
    model.layers.{i}.mlp.gate_proj            layers.{i}.feed_forward.gate_up_proj
    model.layers.{i}.mlp.up_proj              layers.{i}.feed_forward.gate_up_proj
    """
EXPERTS = "\n model.layers.{i}.mlp.gate layers.{i}.feed_forward.router" + "".join(
    f"\n model.layers.{{i}}.mlp.experts.{expert}.{reference} layers.{{i}}.feed_forward.ffns.expert_{expert}.{candidate}"
    for expert in range(3)
    for reference, candidate in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
)


def carry_fused(ref, cand):
    straight(links(BODY + DOWN))(ref, cand)
    for index in (0, 1):
        reference, candidate = f"model.layers.{index}.", f"layers.{index}."
        key_and_value = [reference + "self_attn.k_proj", reference + "self_attn.v_proj"]
        fuse(ref, key_and_value, cand, candidate + "attention.wkv")
        fuse(
            ref, [reference + "mlp.gate_proj", reference + "mlp.up_proj"], cand, candidate + "feed_forward.gate_up_proj"
        )


PAIRS = (
    # Key and value in one, gate and up in one.
    pair("llama_fused_kv_and_gate_up", llama, with_fused, IDS, links(BODY + FUSED + DOWN), carry_fused),
    # Experts in a list, the gate first, against a dictionary of experts with the router last.
    pair("llama_experts", with_experts, with_routed_ffns, IDS, links(BODY + KEY_AND_VALUE + EXPERTS)),
)
