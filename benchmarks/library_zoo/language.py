"""Hugging Face's transformers and PaddleNLP's or PaddleFormers', as small as they go."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddleformers.transformers.llama.configuration as formers
import paddleformers.transformers.llama.modeling as formers_models
import paddlenlp.transformers as nlp
import transformers as hf

from library_zoo.pair import Pair, State, both, images, renamed, tokens

_SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = {
    **_SIZES,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_ENCODER = (
    (r"LayerNorm", "layer_norm"),
    (r"^(.*)encoder\.layer\.", r"\1encoder.layers."),
    (r"attention\.self\.query", "self_attn.q_proj"),
    (r"attention\.self\.key", "self_attn.k_proj"),
    (r"attention\.self\.value", "self_attn.v_proj"),
    (r"attention\.output\.dense", "self_attn.out_proj"),
    (r"attention\.output\.layer_norm", "norm1"),
    (r"intermediate\.dense", "linear1"),
    (r"output\.dense", "linear2"),
    (r"(layers\.\d)\.output\.layer_norm", r"\1.norm2"),
)


def _pair(
    name: str,
    classes: tuple[str, str],
    options: dict[str, Any],
    candidate: dict[str, Any] | None = None,
    reference: dict[str, Any] | None = None,
    **more: Any,
) -> Pair:
    """The two classes' configurations are named after what precedes ``Model`` or ``For`` in their names."""

    def made(library: Any, name: str, given: dict[str, Any]) -> Any:
        family = name.split("Model")[0].split("For")[0].removesuffix("LMHead")
        return getattr(library, name)(getattr(library, f"{family}Config")(**given))

    def build() -> tuple[Any, Any]:
        return (
            made(hf, classes[0], {**options, **(reference or {})}),
            made(nlp, classes[1], {**options, **(candidate or {})}),
        )

    more.setdefault("inputs", tokens())
    return Pair(f"language/{name}", build, **more)


def _positions() -> Any:
    draw = np.random.default_rng(0)
    ids, positions = both(draw.integers(5, 64, (2, 9))), both(np.tile(np.arange(9), (2, 1)))
    return tuple({"input_ids": ids[k], "position_ids": positions[k]} for k in range(2))


def _gpt(state: State) -> State:
    made: State = {}
    for name, value in state.items():
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            value = value.T
        if "c_attn" in name:
            for part, piece in zip("qkv", np.split(value, 3)):
                made[name.replace("c_attn", f"{part}_proj")] = piece
        else:
            made[name] = value
    return renamed(
        (r"^transformer\.wte", "gpt.embeddings.word_embeddings"),
        (r"^transformer\.wpe", "gpt.embeddings.position_embeddings"),
        (r"^transformer\.ln_f", "gpt.decoder.norm"),
        (r"^transformer\.h\.", "gpt.decoder.layers."),
        (r"attn\.c_proj", "attn.out_proj"),
        (r"\.attn\.", ".self_attn."),
        (r"ln_(\d)", r"norm\1"),
        (r"mlp\.c_fc", "linear1"),
        (r"mlp\.c_proj", "linear2"),
    )(made)


def _llama(state: State) -> State:
    made = renamed((r"^model\.", "llama."))(state)
    return made | {"lm_head.weight": made["lm_head.weight"].T}


def _opt(state: State) -> State:
    return renamed(
        (r"^model\.decoder\.embed_tokens", "opt.embeddings.word_embeddings"),
        (r"^model\.decoder\.embed_positions", "opt.embeddings.position_embeddings"),
        (r"^model\.", "opt."),
        (r"layers\.(\d)\.self_attn_layer_norm", r"layers.\1.norm1"),
        (r"layers\.(\d)\.final_layer_norm", r"layers.\1.norm2"),
        (r"fc(\d)", r"linear\1"),
        (r"^lm_head\.weight", "lm_head.decoder_weight"),
    )(state)


def _t5(state: State) -> State:
    return {name: value for name, value in state.items() if "embed_tokens" not in name}


def _bart(state: State) -> State:
    return renamed(
        (r"^(..coder)\.embed_positions", r"\1.\1_embed_positions"),
        (r"^(..coder)\.layernorm_embedding", r"\1.\1_layernorm_embedding"),
        (r"^(..coder)\.layers", r"\1.\1.layers"),
        (r"^(..coder)\.layer_norm", r"\1.\1.norm"),
        (r"^encoder(.*)\.self_attn_layer_norm", r"encoder\1.norm1"),
        (r"^encoder(.*)\.final_layer_norm", r"encoder\1.norm2"),
        (r"^decoder(.*)\.self_attn_layer_norm", r"decoder\1.norm1"),
        (r"^decoder(.*)\.encoder_attn_layer_norm", r"decoder\1.norm2"),
        (r"^decoder(.*)\.final_layer_norm", r"decoder\1.norm3"),
        (r"encoder_attn\.", "cross_attn."),
        (r"fc(\d)", r"linear\1"),
    )({name: value for name, value in state.items() if "embed_tokens" not in name})


def _llamas(tied: bool) -> tuple[Any, Any]:
    fused = {"fuse_rms_norm": False, "fuse_attention_qkv": False, "fuse_attention_ffn": False}
    return (
        hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, tie_word_embeddings=tied)),
        formers_models.LlamaForCausalLM(formers.LlamaConfig(**_LLAMA, **fused, tie_word_embeddings=tied)),
    )


def _bloom(state: State) -> State:
    return renamed((r"^transformer\.", "bloom."), (r"^lm_head\.weight", "lm_head.decoder_weight"))(state)


_SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_FNET = {k: v for k, v in _BERT.items() if k not in ("num_attention_heads", "attention_probs_dropout_prob")}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_DISTIL = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 32}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 48}
_LLAMA = {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 32, "num_key_value_heads": 2}
_PLAIN = {"use_flash_attention": False}

_mpnet = renamed(
    (r"attention\.attn", "attention"),
    (r"intermediate\.dense", "ffn"),
    (r"output\.dense", "ffn_output"),
    (r"output\.LayerNorm", "layer_norm"),
    (r"LayerNorm", "layer_norm"),
)
_fnet = renamed((r"LayerNorm", "layer_norm"), (r"encoder\.layer\.", "encoder.layers."))

PAIRS = [
    _pair("bert", ("BertModel", "BertModel"), _BERT, outputs=2, truth=renamed(*_ENCODER)),
    _pair(
        "bert_classifier",
        ("BertForSequenceClassification", "BertForSequenceClassification"),
        {**_BERT, "num_labels": 3},
        truth=renamed(*_ENCODER),
    ),
    _pair(
        "ernie",
        ("ErnieModel", "ErnieModel"),
        {**_BERT, "use_task_id": True, "task_type_vocab_size": 3, "hidden_act": "gelu"},
        outputs=2,
        truth=renamed(*_ENCODER),
    ),
    _pair("roberta", ("RobertaModel", "RobertaModel"), _BERT, inputs=_positions, outputs=2, truth=renamed(*_ENCODER)),
    _pair("electra", ("ElectraModel", "ElectraModel"), {**_BERT, "embedding_size": 16}, truth=renamed(*_ENCODER)),
    _pair(
        "distilbert",
        ("DistilBertModel", "DistilBertModel"),
        {},
        reference=_DISTIL,
        candidate=_BERT,
        truth=renamed(
            (r"LayerNorm", "layer_norm"),
            (r"^transformer\.layer\.", "encoder.layers."),
            (r"attention\.(q|k|v|out)_lin", r"self_attn.\1_proj"),
            (r"sa_layer_norm", "norm1"),
            (r"output_layer_norm", "norm2"),
            (r"ffn\.lin(\d)", r"linear\1"),
        ),
    ),
    _pair(
        "albert",
        ("AlbertModel", "AlbertModel"),
        {**_BERT, "embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 1, "hidden_act": "gelu"},
        outputs=2,
        truth=renamed((r"LayerNorm", "layer_norm")),
    ),
    _pair(
        "megatronbert",
        ("MegatronBertModel", "MegatronBertModel"),
        _BERT,
        outputs=2,
        truth=renamed((r"\bln\b", "layer_norm")),
    ),
    _pair("nystromformer", ("NystromformerModel", "NystromformerModel"), _BERT, truth=renamed()),
    _pair(
        "mpnet",
        ("MPNetModel", "MPNetModel"),
        {**_BERT, "layer_norm_eps": 1e-5},
        outputs=2,
        truth=_mpnet,
    ),
    _pair(
        "gpt2",
        ("GPT2LMHeadModel", "GPTLMHeadModel"),
        {},
        reference=_GPT2,
        candidate={**_BERT, **_PLAIN},
        truth=_gpt,
    ),
    _pair(
        "opt",
        ("OPTForCausalLM", "OPTForCausalLM"),
        {**_SIZES, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
        reference={"ffn_dim": 48},
        candidate={"intermediate_size": 48, "fuse_attention_qkv": False},
        truth=_opt,
    ),
    _pair(
        "bloom",
        ("BloomForCausalLM", "BloomForCausalLM"),
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        candidate=_PLAIN,
        truth=_bloom,
    ),
    Pair("language/llama_paddleformers", lambda: _llamas(False), tokens(), truth=lambda state: state),
    Pair("language/llama_paddleformers/tied", lambda: _llamas(True), tokens(), truth=lambda state: state),
    _pair(
        "bert_pretraining",
        ("BertForPreTraining", "BertForPretraining"),
        _BERT,
        outputs=2,
        truth=lambda state: renamed(
            *_ENCODER,
            (r"predictions\.transform\.dense", "predictions.transform"),
            (r"predictions\.transform\.layer_norm", "predictions.layer_norm"),
            (r"predictions\.bias", "predictions.decoder_bias"),
        )({k: v for k, v in state.items() if ".decoder." not in k}),
    ),
    _pair("fnet", ("FNetModel", "FNetModel"), _FNET, outputs=2, truth=_fnet, inputs=tokens(batch=1)),
    _pair(
        "fnet/batch",
        ("FNetModel", "FNetModel"),
        _FNET,
        outputs=2,
        truth=_fnet,
        same=False,
        why="paddle's Fourier transform runs over the batch, too",
    ),
    _pair(
        "clip_vision",
        ("CLIPVisionModel", "CLIPVisionModel"),
        {**_CLIP, "hidden_act": "quick_gelu"},
        inputs=images(32),
        outputs=2,
        truth=renamed(
            (r"^(vision_model\.)?", "vision_model."),
            (r"embeddings\.", ""),
            (r"patch_embedding", "conv1"),
            (r"position_embedding", "positional_embedding"),
            (r"pre_layrnorm", "ln_pre"),
            (r"post_layernorm", "ln_post"),
            (r"encoder\.layers", "transformer.layers"),
            (r"layer_norm(\d)", r"norm\1"),
            (r"mlp\.fc(\d)", r"linear\1"),
        ),
    ),
    _pair("llama", ("LlamaForCausalLM", "LlamaForCausalLM"), _LLAMA, candidate=_PLAIN, truth=_llama),
    _pair(
        "t5",
        ("T5Model", "T5Model"),
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
        inputs=tokens(names=("input_ids", "decoder_input_ids")),
        truth=_t5,
    ),
    _pair(
        "bart",
        ("BartModel", "BartModel"),
        _SEQ2SEQ,
        candidate={"num_encoder_layers": 2, "num_decoder_layers": 2},
        inputs=tokens(names=("input_ids", "decoder_input_ids")),
        truth=_bart,
    ),
    _pair(
        "mbart",
        ("MBartModel", "MBartModel"),
        {**_SEQ2SEQ, "scale_embedding": True},
        candidate={"num_encoder_layers": 2, "num_decoder_layers": 2},
        inputs=tokens(names=("input_ids", "decoder_input_ids")),
        truth=_bart,
    ),
    _pair(
        "mbart/scale",
        ("MBartModel", "MBartModel"),
        _SEQ2SEQ,
        candidate={"num_encoder_layers": 2, "num_decoder_layers": 2},
        inputs=tokens(names=("input_ids", "decoder_input_ids")),
        truth=_bart,
        same=False,
        why="by default paddle multiplies the embeddings by the root of their width, torch does not",
    ),
    _pair(
        "ernie/relu",
        ("ErnieModel", "ErnieModel"),
        {**_BERT, "use_task_id": True, "task_type_vocab_size": 3},
        candidate={"hidden_act": "relu"},
        outputs=2,
        truth=renamed(*_ENCODER),
        same=False,
        why="hidden_act set to relu in paddle, gelu in torch",
    ),
    _pair(
        "albert/gelu",
        ("AlbertModel", "AlbertModel"),
        {**_BERT, "embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 1},
        outputs=2,
        truth=renamed((r"LayerNorm", "layer_norm")),
        same=False,
        why="hidden_act's default is gelu_new, the approximation with tanh, in torch, and gelu in paddle",
    ),
    _pair(
        "mpnet/eps",
        ("MPNetModel", "MPNetModel"),
        _BERT,
        outputs=2,
        truth=_mpnet,
        same=False,
        why="layer_norm_eps is 1e-12 in torch, 1e-5 in paddle",
    ),
]
