"""What the names of known libraries' layers say, and that none contradicts its counterpart in another."""

from __future__ import annotations

import itertools

import pytest

from padiff.align.matching import names

#: What a layer is: the family and value that its name should tell, and how libraries spell it. The spellings are
#: those of transformers, timm, fairseq's BART, Meta's LLaMA, OpenAI's CLIP, GPT-NeoX and paddle.nn.
SPELT = {
    ("attention part", "q"): {
        "bert": "encoder.layer.0.attention.self.query",
        "llama hf": "model.layers.0.self_attn.q_proj",
        "llama meta": "layers.0.attention.wq",
        "t5": "encoder.block.0.layer.0.SelfAttention.q",
        "bart": "encoder.layers.0.self_attn.q_proj",
        "distilbert": "transformer.layer.0.attention.q_lin",
        "vit hf": "encoder.layer.0.attention.attention.query",
        "clip": "text_model.encoder.layers.0.self_attn.q_proj",
        "paddle": "encoder.layers.0.self_attn.q_proj",
    },
    ("attention part", "k"): {
        "bert": "encoder.layer.0.attention.self.key",
        "llama hf": "model.layers.0.self_attn.k_proj",
        "llama meta": "layers.0.attention.wk",
        "t5": "encoder.block.0.layer.0.SelfAttention.k",
        "distilbert": "transformer.layer.0.attention.k_lin",
        "vit hf": "encoder.layer.0.attention.attention.key",
        "paddle": "encoder.layers.0.self_attn.k_proj",
    },
    ("attention part", "v"): {
        "bert": "encoder.layer.0.attention.self.value",
        "llama hf": "model.layers.0.self_attn.v_proj",
        "llama meta": "layers.0.attention.wv",
        "t5": "encoder.block.0.layer.0.SelfAttention.v",
        "distilbert": "transformer.layer.0.attention.v_lin",
        "vit hf": "encoder.layer.0.attention.attention.value",
        "paddle": "encoder.layers.0.self_attn.v_proj",
    },
    ("attention part", "o"): {
        "bert": "encoder.layer.0.attention.output.dense",
        "gpt2": "transformer.h.0.attn.c_proj",
        "llama hf": "model.layers.0.self_attn.o_proj",
        "llama meta": "layers.0.attention.wo",
        "t5": "encoder.block.0.layer.0.SelfAttention.o",
        "bart": "encoder.layers.0.self_attn.out_proj",
        "distilbert": "transformer.layer.0.attention.out_lin",
        "vit timm": "blocks.0.attn.proj",
        "vit hf": "encoder.layer.0.attention.output.dense",
        "neox": "layers.0.attention.dense",
        "paddle": "encoder.layers.0.self_attn.out_proj",
    },
    ("attention part", "qkv"): {
        "gpt2": "transformer.h.0.attn.c_attn",
        "vit timm": "blocks.0.attn.qkv",
        "neox": "layers.0.attention.query_key_value",
        "torch": "encoder.layers.0.self_attn.in_proj",
    },
    ("mlp part", "in"): {
        "bert": "encoder.layer.0.intermediate.dense",
        "gpt2": "transformer.h.0.mlp.c_fc",
        "bart": "encoder.layers.0.fc1",
        "distilbert": "transformer.layer.0.ffn.lin1",
        "t5": "encoder.block.0.layer.1.DenseReluDense.wi",
        "vit timm": "blocks.0.mlp.fc1",
        "vit hf": "encoder.layer.0.intermediate.dense",
        "clip": "vision_model.encoder.layers.0.mlp.fc1",
        "neox": "layers.0.mlp.dense_h_to_4h",
        "paddle": "encoder.layers.0.linear1",
    },
    ("mlp part", "out"): {
        "bert": "encoder.layer.0.output.dense",
        "gpt2": "transformer.h.0.mlp.c_proj",
        "llama hf": "model.layers.0.mlp.down_proj",
        "llama meta": "layers.0.feed_forward.w2",
        "bart": "encoder.layers.0.fc2",
        "distilbert": "transformer.layer.0.ffn.lin2",
        "vit timm": "blocks.0.mlp.fc2",
        "vit hf": "encoder.layer.0.output.dense",
        "neox": "layers.0.mlp.dense_4h_to_h",
        "paddle": "encoder.layers.0.linear2",
    },
    ("mlp part", "gate"): {
        "llama hf": "model.layers.0.mlp.gate_proj",
        "llama meta": "layers.0.feed_forward.w1",
        "t5": "encoder.block.0.layer.1.DenseReluDense.wi_0",
    },
    ("mlp part", "up"): {
        "llama hf": "model.layers.0.mlp.up_proj",
        "llama meta": "layers.0.feed_forward.w3",
        "t5": "encoder.block.0.layer.1.DenseReluDense.wi_1",
    },
    ("embedding", "word"): {
        "bert": "embeddings.word_embeddings",
        "gpt2": "transformer.wte",
        "llama hf": "model.embed_tokens",
        "llama meta": "tok_embeddings",
        "t5": "shared",
        "distilbert": "embeddings.word_embeddings",
        "clip": "text_model.embeddings.token_embedding",
    },
    ("embedding", "position"): {
        "bert": "embeddings.position_embeddings",
        "gpt2": "transformer.wpe",
        "bart": "encoder.embed_positions",
        "vit timm": "pos_embed",
        "vit hf": "embeddings.position_embeddings",
        "clip": "text_model.embeddings.position_embedding",
    },
    ("embedding", "segment"): {"bert": "embeddings.token_type_embeddings"},
    ("embedding", "class"): {
        "vit timm": "cls_token",
        "vit hf": "embeddings.cls_token",
        "clip": "vision_model.embeddings.class_embedding",
    },
    ("attention of", "another"): {
        "bart": "decoder.layers.0.encoder_attn.q_proj",
        "t5": "decoder.block.0.layer.1.EncDecAttention.q",
        "torch": "decoder.layers.0.multihead_attn.in_proj",
        "paddle": "decoder.layers.0.cross_attn.q_proj",
    },
    ("attention of", "itself"): {
        "bart": "decoder.layers.0.self_attn.q_proj",
        "t5": "decoder.block.0.layer.0.SelfAttention.q",
        "paddle": "decoder.layers.0.self_attn.q_proj",
    },
    ("tower", "decoder"): {"bart": "decoder.layers.0.fc1", "t5": "decoder.block.0.layer.2.DenseReluDense.wi"},
    ("tower", "encoder"): {"bart": "encoder.layers.0.fc1", "t5": "encoder.block.0.layer.1.DenseReluDense.wi"},
    ("modality", "vision"): {"clip": "vision_model.encoder.layers.0.mlp.fc1", "openai": "visual.transformer.ln_1"},
    ("modality", "text"): {"clip": "text_model.encoder.layers.0.mlp.fc1"},
    ("branch", "shortcut"): {"torchvision": "layer2.0.downsample.0", "paddle": "stages.1.0.short.conv"},
    ("direction", "backward"): {"torch": "lstm.ih_l0_reverse", "paddle": "lstm.0.cell_bw"},
}

#: Layers of one block, in one order, by library: each answers to the one at its place, and to no other. "-" where a
#: library has none.
BLOCKS = {
    "q k v o in out": {
        "bert": ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                 "intermediate.dense", "output.dense"),
        "bart": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"),
        "distilbert": ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "ffn.lin1",
                       "ffn.lin2"),
        "vit hf": ("attention.attention.query", "attention.attention.key", "attention.attention.value",
                   "attention.output.dense", "intermediate.dense", "output.dense"),
        "clip": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1",
                 "mlp.fc2"),
        "paddle": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "linear1",
                   "linear2"),
        "t5": ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v",
               "layer.0.SelfAttention.o", "layer.1.DenseReluDense.wi", "-"),
        "gpt-j": ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
    },
    "qkv o in out": {
        "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        "timm": ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"),
        "neox": ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        "torch": ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2"),
    },
    "q k v o gate up down": {
        "hf": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
               "mlp.up_proj", "mlp.down_proj"),
        "meta": ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w3",
                 "feed_forward.w2"),
        "t5": ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o", "DenseReluDense.wi_0",
               "DenseReluDense.wi_1", "-"),
    },
    "word position segment": {
        "bert": ("embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings"),
        "ernie": ("embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings"),
        "gpt2": ("transformer.wte", "transformer.wpe", "-"),
        "clip": ("embeddings.token_embedding", "embeddings.position_embedding", "-"),
        "bart": ("embed_tokens", "embed_positions", "-"),
    },
    "norms": {
        "bert": ("attention.output.LayerNorm", "output.LayerNorm"),
        "distilbert": ("sa_layer_norm", "output_layer_norm"),
        "bart": ("self_attn_layer_norm", "final_layer_norm"),
        "llama hf": ("input_layernorm", "post_attention_layernorm"),
        "llama meta": ("attention_norm", "ffn_norm"),
        "vit hf": ("layernorm_before", "layernorm_after"),
        "gpt2": ("ln_1", "ln_2"),
        "paddle": ("norm1", "norm2"),
        "clip": ("layer_norm1", "layer_norm2"),
    },
    "vision text": {
        "hf": ("vision_model.encoder.layers.0.mlp.fc1", "text_model.encoder.layers.0.mlp.fc1"),
        "other": ("visual.transformer.0.mlp.c_fc", "text.transformer.0.mlp.c_fc"),
    },
}  # fmt: skip


def roles(path):
    return dict(names.read(path, path).roles)


def said(path):
    name = names.read(path, path)
    return name.roles, name.words


CASES = [(role, library, path) for role, spelt in SPELT.items() for library, path in spelt.items()]


@pytest.mark.parametrize(("role", "library", "path"), CASES, ids=[f"{role[1]}-{who}" for role, who, _ in CASES])
def test_the_role_is_read_from_the_name(role, library, path):
    assert roles(path).get(role[0]) == role[1]


BETWEEN = [
    (block, one, other) for block, libraries in BLOCKS.items() for one, other in itertools.permutations(libraries, 2)
]
between = pytest.mark.parametrize(("block", "one", "other"), BETWEEN, ids=["-".join(case) for case in BETWEEN])


def contradicted(a, b):
    return names.agreement(said(a), said(b))[1] > 0


@between
def test_no_name_contradicts_its_counterpart(block, one, other):
    pairs = [pair for pair in zip(BLOCKS[block][one], BLOCKS[block][other]) if "-" not in pair]
    assert pairs
    assert not [(a, b) for a, b in pairs if contradicted(a, b)]


def group_of(path):
    return next((family for family in ("attention part", "mlp part") if roles(path).get(family)), "")


@between
def test_names_of_different_parts_contradict_each_other(block, one, other):
    """Within the attention, within the MLP: from one to the other it is their place that tells."""
    if block == "norms":
        return  # their names tell a place among the block's
    crossed = [
        (a, b)
        for (i, a), (j, b) in itertools.product(enumerate(BLOCKS[block][one]), enumerate(BLOCKS[block][other]))
        if i != j and "-" not in (a, b) and group_of(a) == group_of(b)
    ]
    assert crossed
    assert not [(a, b) for a, b in crossed if not contradicted(a, b)]


def test_the_norms_of_a_block_are_paired_in_their_order_where_it_is_given():
    for first, second in BLOCKS["norms"].values():
        places = [names.read(f"layers.0.{path}", "").norm for path in (first, second)]
        assert places in ([0, 0], [0, 3]) or 0 < places[0] < places[1]


@pytest.mark.parametrize(
    "path", ["fc", "layer1.0.conv1", "head", "classifier", "bn1", "features.3", "model.0", "a", "conv_stem"]
)
def test_names_that_say_nothing_are_given_no_part(path):
    assert not {"attention part", "mlp part", "gate", "recurrent part"} & roles(path).keys()


def test_numbers_make_no_difference_to_what_is_said():
    one, other = (names.read(p, p) for p in ("layers.0.fc1", "layers.11.fc1"))
    assert (one.roles, one.words, one.skeleton) == (other.roles, other.words, other.skeleton)
    assert (one.numbers, other.numbers) == ((0, 1), (11, 1))


@pytest.mark.parametrize(
    ("one", "other"), [("layerNorm", "layer_norm"), ("word_embeddings", "wordEmbedding"), ("ffn", "feedforward")]
)
def test_words_are_read_under_one_spelling(one, other):
    assert names.agreement(said(one), said(other))[2] >= 0.5
