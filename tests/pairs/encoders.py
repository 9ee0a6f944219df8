"""Transformer encoders: BERT and ViT in several hands."""

from __future__ import annotations

import re
from functools import partial

from kit.nets import attend

from .copying import put, same, unpack, value
from .pair import links, normal, pair, straight, tokens

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH = 16, 4, 32, 13, 6
SENTENCES = (tokens(2, LENGTH, vocabulary=VOCABULARY),)
VECTORS = (normal(2, LENGTH, WIDTH),)


def bert(kit):
    """Hugging Face's nesting: encoder.layer.N.attention.self.query and so on."""

    class Embeddings(kit.Net):
        def build(self):
            self.word_embeddings = kit.embedding(VOCABULARY, WIDTH)
            self.position_embeddings = kit.embedding(LENGTH, WIDTH)
            self.LayerNorm = kit.layernorm(WIDTH, eps=1e-12)
            self.dropout = kit.Dropout(0.1)

        def forward(self, ids):
            places = kit.tensor(range(LENGTH), None)
            return self.dropout(self.LayerNorm(self.word_embeddings(ids) + self.position_embeddings(places)))

    class SelfAttention(kit.Net):
        def build(self):
            self.query, self.key = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, WIDTH)
            self.value = kit.linear(WIDTH, WIDTH)

        def forward(self, x):
            return attend(kit, self.query(x), self.key(x), self.value(x), HEADS)

    class Output(kit.Net):
        def build(self, inputs):
            self.dense = kit.linear(inputs, WIDTH)
            self.LayerNorm = kit.layernorm(WIDTH, eps=1e-12)
            self.dropout = kit.Dropout(0.1)

        def forward(self, x, residual):
            return self.LayerNorm(self.dropout(self.dense(x)) + residual)

    class Attention(kit.Net):
        def build(self):
            self.self = SelfAttention()
            self.output = Output(WIDTH)

        def forward(self, x):
            return self.output(self.self(x), x)

    class Intermediate(kit.Net):
        def build(self):
            self.dense = kit.linear(WIDTH, HIDDEN)
            self.intermediate_act_fn = kit.GELU()

        def forward(self, x):
            return self.intermediate_act_fn(self.dense(x))

    class BertLayer(kit.Net):
        def build(self):
            self.attention, self.intermediate, self.output = Attention(), Intermediate(), Output(HIDDEN)

        def forward(self, x):
            x = self.attention(x)
            return self.output(self.intermediate(x), x)

    class Encoder(kit.Net):
        def build(self):
            self.layer = kit.List([BertLayer(), BertLayer()])

        def forward(self, x):
            for each in self.layer:
                x = each(x)
            return x

    class Pooler(kit.Net):
        def build(self):
            self.dense = kit.linear(WIDTH, WIDTH)
            self.activation = kit.Tanh()

        def forward(self, x):
            return self.activation(self.dense(x[:, 0]))

    class Bert(kit.Net):
        def build(self):
            self.embeddings, self.encoder, self.pooler = Embeddings(), Encoder(), Pooler()

        def forward(self, ids):
            return self.pooler(self.encoder(self.embeddings(ids)))

    return Bert()


def flat_bert(kit, packed=False, eps=1e-12):
    """Flat blocks with their norms last, q_proj and out_proj (or torch's packed attention), activations functions."""

    class Block(kit.Net):
        def build(self):
            if packed:
                self.attn = kit.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            else:
                self.out_proj = kit.linear(WIDTH, WIDTH)
                self.k_proj, self.v_proj = kit.linear(WIDTH, WIDTH), kit.linear(WIDTH, WIDTH)
                self.q_proj = kit.linear(WIDTH, WIDTH)
            self.fc1, self.fc2 = kit.linear(WIDTH, HIDDEN), kit.linear(HIDDEN, WIDTH)
            self.norm1, self.norm2 = kit.layernorm(WIDTH, eps=eps), kit.layernorm(WIDTH, eps=eps)

        def attention(self, x):
            if packed:
                return self.attn(x, x, x, need_weights=False)[0]
            return self.out_proj(attend(kit, self.q_proj(x), self.k_proj(x), self.v_proj(x), HEADS))

        def forward(self, x):
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.fc2(kit.gelu(self.fc1(x))))

    class TextEncoder(kit.Net):
        def build(self):
            self.blocks = kit.List([Block(), Block()])
            self.pool = kit.linear(WIDTH, WIDTH)
            self.tok, self.pos = kit.embedding(VOCABULARY, WIDTH), kit.param(1, LENGTH, WIDTH)
            self.tok_norm = kit.layernorm(WIDTH, eps=eps)

        def forward(self, ids):
            x = self.tok_norm(self.tok(ids) + self.pos)
            for block in self.blocks:
                x = block(x)
            return kit.tanh(self.pool(x[:, 0]))

    return TextEncoder()


FLAT_TO_BERT = links(
    """
    tok               embeddings.word_embeddings
    (root)            embeddings.position_embeddings
    tok_norm          embeddings.LayerNorm
    blocks.{i}.q_proj     encoder.layer.{i}.attention.self.query
    blocks.{i}.k_proj     encoder.layer.{i}.attention.self.key
    blocks.{i}.v_proj     encoder.layer.{i}.attention.self.value
    blocks.{i}.out_proj   encoder.layer.{i}.attention.output.dense
    blocks.{i}.norm1      encoder.layer.{i}.attention.output.LayerNorm
    blocks.{i}.fc1        encoder.layer.{i}.intermediate.dense
    blocks.{i}.fc2        encoder.layer.{i}.output.dense
    blocks.{i}.norm2      encoder.layer.{i}.output.LayerNorm
    pool              pooler.dense
    """
)
PACKED_TO_BERT = tuple(
    (re.sub("[qkv]_proj", "attn", reference).replace("out_proj", "attn.out_proj"), candidate)
    for reference, candidate in FLAT_TO_BERT
)


def carry_flat_bert(ref, cand):
    straight([entry for entry in FLAT_TO_BERT if entry[0] != "(root)"])(ref, cand)
    put(cand, "embeddings.position_embeddings", "weight", value(ref, "(root)", "pos")[0])


def carry_packed_bert(ref, cand):
    for reference, candidate in PACKED_TO_BERT:
        if not reference.endswith(".attn") and reference != "(root)":
            same(ref, reference, cand, candidate)
    put(cand, "embeddings.position_embeddings", "weight", value(ref, "(root)", "pos")[0])
    for index in (0, 1):
        inside = f"encoder.layer.{index}.attention.self."
        unpack(ref, f"blocks.{index}.attn", cand, [inside + name for name in ("query", "key", "value")])


def torch_encoder(kit):
    """torch's own encoder layers (post-norm), inside a wrapper."""

    class Tagger(kit.Net):
        def build(self):
            layer = kit.nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
            self.encoder = kit.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.decision = kit.linear(WIDTH, 3)

        def forward(self, x):
            return self.decision(self.encoder(x))

    return Tagger()


def paddle_encoder(kit):
    """paddle's own encoder layers."""

    class Tagger(kit.Net):
        def build(self):
            layer = kit.nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0)
            self.body = kit.nn.TransformerEncoder(layer, 2)
            self.head = kit.linear(WIDTH, 3)

        def forward(self, x):
            return self.head(self.body(x))

    return Tagger()


TORCH_TO_DISTIL = links(
    """
    encoder.layers.{i}.self_attn   transformer.layer.{i}.attention.q_lin
    encoder.layers.{i}.self_attn   transformer.layer.{i}.attention.k_lin
    encoder.layers.{i}.self_attn   transformer.layer.{i}.attention.v_lin
    encoder.layers.{i}.self_attn.out_proj   transformer.layer.{i}.attention.out_lin
    encoder.layers.{i}.linear1   transformer.layer.{i}.ffn.lin1
    encoder.layers.{i}.linear2   transformer.layer.{i}.ffn.lin2
    encoder.layers.{i}.norm1     transformer.layer.{i}.sa_layer_norm
    encoder.layers.{i}.norm2     transformer.layer.{i}.output_layer_norm
    decision                     classifier
    """
)
PADDLE_TO_DISTIL = links(
    """
    body.layers.{i}.self_attn.q_proj     transformer.layer.{i}.attention.q_lin
    body.layers.{i}.self_attn.k_proj     transformer.layer.{i}.attention.k_lin
    body.layers.{i}.self_attn.v_proj     transformer.layer.{i}.attention.v_lin
    body.layers.{i}.self_attn.out_proj   transformer.layer.{i}.attention.out_lin
    body.layers.{i}.linear1   transformer.layer.{i}.ffn.lin1
    body.layers.{i}.linear2   transformer.layer.{i}.ffn.lin2
    body.layers.{i}.norm1     transformer.layer.{i}.sa_layer_norm
    body.layers.{i}.norm2     transformer.layer.{i}.output_layer_norm
    head                      classifier
    """
)


TORCH_TO_PADDLE = tuple(
    (reference, {other: native for native, other in PADDLE_TO_DISTIL}[candidate])
    for reference, candidate in TORCH_TO_DISTIL
)


def carry_torch_to_paddle(ref, cand):
    straight([entry for entry in TORCH_TO_PADDLE if not entry[0].endswith("self_attn")])(ref, cand)
    for index in (0, 1):
        inside = f"body.layers.{index}.self_attn."
        unpack(ref, f"encoder.layers.{index}.self_attn", cand, [inside + f"{name}_proj" for name in "qkv"])


PAIRS = (
    # Flat blocks, norms last and output projection first, against Hugging Face's nesting; positions are a parameter
    # of the root against an embedding; gelu and dropout as layers on one side only.
    pair("bert_flat_to_nested", flat_bert, bert, SENTENCES, FLAT_TO_BERT, carry_flat_bert),
    # torch's packed attention against three projections and an output.
    pair("bert_packed", partial(flat_bert, packed=True), bert, SENTENCES, PACKED_TO_BERT, carry_packed_bert),
    # The same, torch's layers against paddle's: packed against paddle's projections.
    pair("encoder_torch_to_paddle", torch_encoder, paddle_encoder, VECTORS, TORCH_TO_PADDLE, carry_torch_to_paddle),
)
