"""Encoders with decoders, and a Conformer."""

from __future__ import annotations

from kit.nets import attend

from .llamas import rms_norm
from .pair import links, normal, pair, tokens

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH = 16, 2, 24, 11, 5


def seq2seq(kit):
    """T5's nesting: encoder before decoder, sublayers in ``layer.0``, ``layer.1``, one embedding shared by both."""
    norm = rms_norm(kit, "weight")

    class T5Attention(kit.Net):
        def build(self):
            for name in "qkvo":
                setattr(self, name, kit.linear(WIDTH, WIDTH, bias=False))

        def forward(self, x, source, causal):
            return self.o(attend(kit, self.q(x), self.k(source), self.v(source), HEADS, causal))

    class SelfAttention(kit.Net):
        def build(self):
            self.SelfAttention, self.layer_norm = T5Attention(), norm(WIDTH)

        def forward(self, x, source, causal):
            inner = self.layer_norm(x)
            return x + self.SelfAttention(inner, inner, causal)

    class CrossAttention(kit.Net):
        def build(self):
            self.EncDecAttention, self.layer_norm = T5Attention(), norm(WIDTH)

        def forward(self, x, source, causal):
            return x + self.EncDecAttention(self.layer_norm(x), source, False)

    class FF(kit.Net):
        def build(self):
            self.wi, self.wo = kit.linear(WIDTH, HIDDEN, bias=False), kit.linear(HIDDEN, WIDTH, bias=False)
            self.layer_norm = norm(WIDTH)

        def forward(self, x, source, causal):
            return x + self.wo(kit.relu(self.wi(self.layer_norm(x))))

    class Block(kit.Net):
        def build(self, cross):
            self.layer = kit.List([SelfAttention(), *([CrossAttention()] if cross else []), FF()])

        def forward(self, x, source, causal):
            for each in self.layer:
                x = each(x, source, causal)
            return x

    class Stack(kit.Net):
        def build(self, embed_tokens, decodes):
            self.decodes = decodes
            self.embed_tokens = embed_tokens
            self.block = kit.List([Block(decodes), Block(decodes)])
            self.final_layer_norm = norm(WIDTH)

        def forward(self, ids, source=None):
            x = self.embed_tokens(ids)
            for block in self.block:
                x = block(x, source, self.decodes)
            return self.final_layer_norm(x)

    class T5(kit.Net):
        def build(self):
            self.shared = kit.embedding(VOCABULARY, WIDTH)
            self.encoder, self.decoder = Stack(self.shared, False), Stack(self.shared, True)
            self.lm_head = kit.linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, source, target):
            return self.lm_head(self.decoder(target, self.encoder(source)))

    return T5()


def marian(kit):
    """The decoder is defined before the encoder, cross attention before self attention; one embedding in the root."""
    norm = rms_norm(kit, "gamma")

    class Attention(kit.Net):
        def build(self):
            self.out_proj = kit.linear(WIDTH, WIDTH, bias=False)
            for name in ("k_proj", "v_proj", "q_proj"):
                setattr(self, name, kit.linear(WIDTH, WIDTH, bias=False))

        def forward(self, x, source, causal=False):
            return self.out_proj(attend(kit, self.q_proj(x), self.k_proj(source), self.v_proj(source), HEADS, causal))

    class Layer(kit.Net):
        def build(self, decodes):
            self.decodes = decodes
            if decodes:
                self.encoder_attn, self.encoder_attn_layer_norm = Attention(), norm(WIDTH)
            self.self_attn, self.self_attn_layer_norm = Attention(), norm(WIDTH)
            self.final_layer_norm = norm(WIDTH)
            self.fc1, self.fc2 = kit.linear(WIDTH, HIDDEN, bias=False), kit.linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x, memory):
            inner = self.self_attn_layer_norm(x)
            x = x + self.self_attn(inner, inner, self.decodes)
            if self.decodes:
                x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), memory)
            return x + self.fc2(kit.relu(self.fc1(self.final_layer_norm(x))))

    class Half(kit.Net):
        def build(self, decodes):
            self.layer_norm = norm(WIDTH)
            self.layers = kit.List([Layer(decodes), Layer(decodes)])

        def forward(self, x, memory=None):
            for layer in self.layers:
                x = layer(x, memory)
            return self.layer_norm(x)

    class Marian(kit.Net):
        def build(self):
            self.generator = kit.linear(WIDTH, VOCABULARY, bias=False)
            self.decoder, self.encoder = Half(True), Half(False)
            self.word_embedding = kit.embedding(VOCABULARY, WIDTH)

        def forward(self, source, target):
            memory = self.encoder(self.word_embedding(source))
            return self.generator(self.decoder(self.word_embedding(target), memory))

    return Marian()


T5_TO_MARIAN = "\n shared word_embedding\n lm_head generator"
for _half, _last in (("encoder", 1), ("decoder", 2)):
    T5_TO_MARIAN += f"\n {_half}.final_layer_norm {_half}.layer_norm"
    for _ours, _theirs in (("0.SelfAttention", "self_attn"), ("1.EncDecAttention", "encoder_attn"))[:_last]:
        T5_TO_MARIAN += "".join(
            f"\n {_half}.block.{{i}}.layer.{_ours}.{short} {_half}.layers.{{i}}.{_theirs}.{long}"
            for short, long in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj"))
        )
        T5_TO_MARIAN += f"\n {_half}.block.{{i}}.layer.{_ours[0]}.layer_norm {_half}.layers.{{i}}.{_theirs}_layer_norm"
    T5_TO_MARIAN += f"""
    {_half}.block.{{i}}.layer.{_last}.wi           {_half}.layers.{{i}}.fc1
    {_half}.block.{{i}}.layer.{_last}.wo           {_half}.layers.{{i}}.fc2
    {_half}.block.{{i}}.layer.{_last}.layer_norm   {_half}.layers.{{i}}.final_layer_norm
    """


def wenet(kit):
    """A Conformer with WeNet's names: the second half of the MLP is defined before the first, norms last."""

    class FeedForward(kit.Net):
        def build(self):
            self.w_1, self.w_2 = kit.linear(WIDTH, HIDDEN), kit.linear(HIDDEN, WIDTH)

        def forward(self, x):
            return self.w_2(kit.silu(self.w_1(x)))

    class Attention(kit.Net):
        def build(self):
            self.linear_q, self.linear_k = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, WIDTH)
            self.linear_v, self.linear_out = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear_out(attend(kit, self.linear_q(x), self.linear_k(x), self.linear_v(x), HEADS))

    class ConvolutionModule(kit.Net):
        def build(self):
            self.pointwise_conv1 = kit.conv1d(WIDTH, 2 * WIDTH, 1)
            self.depthwise_conv = kit.conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            self.norm = kit.batchnorm1d(WIDTH)
            self.pointwise_conv2 = kit.conv1d(WIDTH, WIDTH, 1)

        def forward(self, x):
            both = self.pointwise_conv1(kit.permute(x, (0, 2, 1)))
            out = self.depthwise_conv(both[:, :WIDTH] * kit.sigmoid(both[:, WIDTH:]))
            return kit.permute(self.pointwise_conv2(kit.silu(self.norm(out))), (0, 2, 1))

    class EncoderLayer(kit.Net):
        def build(self):
            self.self_attn, self.feed_forward, self.feed_forward_macaron = Attention(), FeedForward(), FeedForward()
            self.conv_module = ConvolutionModule()
            self.norm_ff, self.norm_mha = kit.layernorm(WIDTH), kit.layernorm(WIDTH)
            self.norm_ff_macaron = kit.layernorm(WIDTH)
            self.norm_conv, self.norm_final = kit.layernorm(WIDTH), kit.layernorm(WIDTH)

        def forward(self, x):
            x = x + 0.5 * self.feed_forward_macaron(self.norm_ff_macaron(x))
            x = x + self.self_attn(self.norm_mha(x))
            x = x + self.conv_module(self.norm_conv(x))
            return self.norm_final(x + 0.5 * self.feed_forward(self.norm_ff(x)))

    return kit.named(encoders=kit.Sequential(EncoderLayer(), EncoderLayer()), ctc=kit.linear(WIDTH, 4))


def conformer(kit):
    """torchaudio's names: each part a Sequential that starts with its norm; pointwise layers are Linear."""

    def feed():
        up, down = kit.linear(WIDTH, HIDDEN), kit.linear(HIDDEN, WIDTH)
        return kit.named(sequential=kit.Sequential(kit.layernorm(WIDTH), up, kit.SiLU(), kit.Dropout(0.1), down))

    class Convolution(kit.Net):
        def build(self):
            self.layer_norm, self.into = kit.layernorm(WIDTH), kit.linear(WIDTH, 2 * WIDTH)
            depthwise = kit.conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
            self.sequential = kit.Sequential(depthwise, kit.batchnorm1d(WIDTH), kit.SiLU())
            self.out = kit.linear(WIDTH, WIDTH)

        def forward(self, x):
            both = self.into(self.layer_norm(x))
            gated = kit.permute(both[:, :, :WIDTH] * kit.sigmoid(both[:, :, WIDTH:]), (0, 2, 1))
            return self.out(kit.permute(self.sequential(gated), (0, 2, 1)))

    class ConformerLayer(kit.Net):
        def build(self):
            self.ffn1 = feed()
            self.self_attn_layer_norm = kit.layernorm(WIDTH)
            self.self_attn = kit.Dict({f"{name}_proj": kit.linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")})
            self.convolution = Convolution()
            self.ffn2 = feed()
            self.final_layer_norm = kit.layernorm(WIDTH)

        def forward(self, x):
            x = x + 0.5 * self.ffn1(x)
            inner = self.self_attn_layer_norm(x)
            q, k, v = (self.self_attn[f"{name}_proj"](inner) for name in "qkv")
            x = x + self.self_attn["out_proj"](attend(kit, q, k, v, HEADS))
            x = x + self.convolution(x)
            return self.final_layer_norm(x + 0.5 * self.ffn2(x))

    class Recognizer(kit.Net):
        def build(self):
            self.layers, self.output_linear = kit.List([ConformerLayer(), ConformerLayer()]), kit.linear(WIDTH, 4)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.output_linear(x)

    return Recognizer()


CONFORMER = links(
    """
    ctc                                         output_linear
    encoders.{i}.norm_ff_macaron                layers.{i}.ffn1.sequential.0
    encoders.{i}.feed_forward_macaron.w_1       layers.{i}.ffn1.sequential.1
    encoders.{i}.feed_forward_macaron.w_2       layers.{i}.ffn1.sequential.4
    encoders.{i}.norm_mha                       layers.{i}.self_attn_layer_norm
    encoders.{i}.self_attn.linear_q             layers.{i}.self_attn.q_proj
    encoders.{i}.self_attn.linear_k             layers.{i}.self_attn.k_proj
    encoders.{i}.self_attn.linear_v             layers.{i}.self_attn.v_proj
    encoders.{i}.self_attn.linear_out           layers.{i}.self_attn.out_proj
    encoders.{i}.norm_conv                      layers.{i}.convolution.layer_norm
    encoders.{i}.conv_module.pointwise_conv1    layers.{i}.convolution.into
    encoders.{i}.conv_module.depthwise_conv     layers.{i}.convolution.sequential.0
    encoders.{i}.conv_module.norm               layers.{i}.convolution.sequential.1
    encoders.{i}.conv_module.pointwise_conv2    layers.{i}.convolution.out
    encoders.{i}.norm_ff                        layers.{i}.ffn2.sequential.0
    encoders.{i}.feed_forward.w_1               layers.{i}.ffn2.sequential.1
    encoders.{i}.feed_forward.w_2               layers.{i}.ffn2.sequential.4
    encoders.{i}.norm_final                     layers.{i}.final_layer_norm
    """
)

PAIRS = (
    # Encoder and decoder in the other order, cross attention before self attention, an embedding found under three
    # names against one.
    pair(
        "t5_to_marian",
        seq2seq,
        marian,
        (tokens(2, LENGTH, vocabulary=VOCABULARY), tokens(2, 4, vocabulary=VOCABULARY, seed=9)),
        links(T5_TO_MARIAN),
    ),
    # The two halves of the MLP have one shape, and neither their names nor the order tell which is which; pointwise
    # convolutions over time against Linear.
    pair("conformer_macaron", wenet, conformer, (normal(2, LENGTH, WIDTH),), CONFORMER, evidence="execution"),
)
