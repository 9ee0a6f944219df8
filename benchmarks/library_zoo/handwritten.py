"""Hugging Face's, timm's and torch's models and models that were written anew for paddle, in another style."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import timm.models.mlp_mixer
import timm.models.vision_transformer
import torch
import transformers as hf
from paddle.nn import functional

from library_zoo.pair import Pair, State, both, images, renamed, tokens

L = paddle.nn.Linear


def _heads(x: Any, n: int) -> Any:
    b, t, d = x.shape
    return x.reshape([b, t, n, d // n]).transpose([0, 2, 1, 3])


def _mix(q: Any, k: Any, v: Any, causal: bool) -> Any:
    s = q @ k.transpose([0, 1, 3, 2]) / math.sqrt(q.shape[-1])
    if causal:
        s = s + paddle.triu(paddle.full([q.shape[2], k.shape[2]], -1e9), 1)
    y = functional.softmax(s, -1) @ v
    return y.transpose([0, 2, 1, 3]).flatten(2)


def _rotate(x: Any, share: float, base: float = 10000.0) -> Any:
    d = int(x.shape[-1] * share)
    inv = 1.0 / base ** (paddle.arange(0, d, 2, dtype="float32") / d)
    angle = paddle.outer(paddle.arange(x.shape[2], dtype="float32"), inv)
    c, s = paddle.concat([angle.cos()] * 2, -1), paddle.concat([angle.sin()] * 2, -1)
    y, rest = x[..., :d], x[..., d:]
    turned = paddle.concat([-y[..., d // 2 :], y[..., : d // 2]], -1)
    return paddle.concat([y * c + turned * s, rest], -1)


class Rms(paddle.nn.Layer):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.g = self.create_parameter([d], default_initializer=paddle.nn.initializer.Constant(1.0))

    def forward(self, x: Any) -> Any:
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.g


class NeoBlock(paddle.nn.Layer):
    def __init__(self, d: int, m: int, n: int) -> None:
        super().__init__()
        self.n = n
        self.pre1, self.pre2 = paddle.nn.LayerNorm(d), paddle.nn.LayerNorm(d)
        self.wq, self.wk, self.wv, self.wo = L(d, d), L(d, d), L(d, d), L(d, d)
        self.up, self.down = L(d, m), L(m, d)

    def forward(self, x: Any) -> Any:
        y = self.pre1(x)
        q, k = (_rotate(_heads(w(y), self.n), 0.5) for w in (self.wq, self.wk))
        return (
            x
            + self.wo(_mix(q, k, _heads(self.wv(y), self.n), True))
            + self.down(functional.gelu(self.up(self.pre2(x))))
        )


class Neo(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.tok = paddle.nn.Embedding(64, 32)
        self.blocks = paddle.nn.LayerList([NeoBlock(32, 48, 4) for _ in range(2)])
        self.final = paddle.nn.LayerNorm(32)
        self.out = L(32, 64, bias_attr=False)

    def forward(self, input_ids: Any) -> Any:
        x = self.tok(input_ids)
        for b in self.blocks:
            x = b(x)
        return self.out(self.final(x))


def _neox() -> Any:
    c = hf.GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        rotary_pct=0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    return hf.GPTNeoXForCausalLM(c), Neo()


def _neox_truth(s: State) -> State:
    made: State = {}
    for k, v in s.items():
        if "query_key_value" in k:
            parts = v.reshape(4, 3, 8, *v.shape[1:])
            for j, n in enumerate("qkv"):
                made[k.replace("attention.query_key_value", f"w{n}")] = parts[:, j].reshape(32, *v.shape[1:])
        elif "inv_freq" not in k and "rotary" not in k:
            made[k] = v
    return renamed(
        (r"^gpt_neox\.", ""),
        ("embed_in", "tok"),
        (r"^layers", "blocks"),
        ("input_layernorm", "pre1"),
        ("post_attention_layernorm", "pre2"),
        (r"attention\.dense", "wo"),
        ("mlp.dense_h_to_4h", "up"),
        ("mlp.dense_4h_to_h", "down"),
        ("final_layer_norm", "final"),
        (r"^(embed_out|lm_head)", "out"),
    )(made)


class Phi(paddle.nn.Layer):
    """Lists by kind, not by block; grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.E = paddle.nn.Embedding(64, 32)
        made = paddle.nn.LayerList
        self.n1, self.n2 = made([Rms(32) for _ in range(2)]), made([Rms(32) for _ in range(2)])
        self.q = made([L(32, 32, bias_attr=False) for _ in range(2)])
        self.k = made([L(32, 16, bias_attr=False) for _ in range(2)])
        self.v = made([L(32, 16, bias_attr=False) for _ in range(2)])
        self.o = made([L(32, 32, bias_attr=False) for _ in range(2)])
        self.w1 = made([L(32, 48, bias_attr=False) for _ in range(2)])
        self.w3 = made([L(32, 48, bias_attr=False) for _ in range(2)])
        self.w2 = made([L(48, 32, bias_attr=False) for _ in range(2)])
        self.n = Rms(32)
        self.head = L(32, 64, bias_attr=False)

    def forward(self, input_ids: Any) -> Any:
        x = self.E(input_ids)
        for i in range(2):
            y = self.n1[i](x)
            q, k, v = _heads(self.q[i](y), 4), _heads(self.k[i](y), 2), _heads(self.v[i](y), 2)
            k, v = (paddle.repeat_interleave(t, 2, 1) for t in (_rotate(k, 1.0), v))
            x = x + self.o[i](_mix(_rotate(q, 1.0), k, v, True))
            y = self.n2[i](x)
            x = x + self.w2[i](functional.silu(self.w1[i](y)) * self.w3[i](y))
        return self.head(self.n(x))


def _phi() -> Any:
    c = hf.Phi3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        original_max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return hf.Phi3ForCausalLM(c), Phi()


def _phi_truth(s: State) -> State:
    made: State = {}
    for k, v in s.items():
        p = k.split(".")
        i = p[2] if p[1] == "layers" else ""
        if "qkv_proj" in k:
            made[f"q.{i}.weight"], made[f"k.{i}.weight"], made[f"v.{i}.weight"] = v[:32], v[32:48], v[48:]
        elif "gate_up" in k:
            made[f"w1.{i}.weight"], made[f"w3.{i}.weight"] = v[:48], v[48:]
        elif "down_proj" in k:
            made[f"w2.{i}.weight"] = v
        elif "o_proj" in k:
            made[f"o.{i}.weight"] = v
        elif "input_layernorm" in k:
            made[f"n1.{i}.g"] = v
        elif "post_attention" in k:
            made[f"n2.{i}.g"] = v
        elif k == "model.norm.weight":
            made["n.g"] = v
        elif "embed_tokens" in k:
            made["E.weight"] = v
        elif "lm_head" in k:
            made["head.weight"] = v
    return made


class Enc(paddle.nn.Layer):
    """Pre-norm block with one matrix for q, k and v."""

    def __init__(self, d: int, m: int, n: int, causal: bool = False, quick: bool = False) -> None:
        super().__init__()
        self.n, self.causal, self.quick = n, causal, quick
        self.att_in, self.att_out = L(d, 3 * d), L(d, d)
        self.ff = paddle.nn.Sequential(L(d, m), paddle.nn.GELU(), L(m, d))
        self.norms = paddle.nn.LayerList([paddle.nn.LayerNorm(d, 1e-5 if quick or causal else 1e-6) for _ in range(2)])

    def forward(self, x: Any) -> Any:
        q, k, v = paddle.split(self.att_in(self.norms[0](x)), 3, -1)
        x = x + self.att_out(_mix(*(_heads(t, self.n) for t in (q, k, v)), self.causal))
        y = self.norms[1](x)
        if self.quick:
            h = self.ff[0](y)
            return x + self.ff[2](h * functional.sigmoid(1.702 * h))
        return x + self.ff(y)


class Patches(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.token = self.create_parameter([48])
        self.where = self.create_parameter([17, 48])
        self.proj = L(3 * 64, 48)
        self.blocks = paddle.nn.Sequential(*[Enc(48, 96, 4) for _ in range(2)])
        self.last = paddle.nn.LayerNorm(48, 1e-6)
        self.fc = L(48, 10)

    def forward(self, x: Any) -> Any:
        b = x.shape[0]
        x = x.reshape([b, 3, 4, 8, 4, 8]).transpose([0, 2, 4, 1, 3, 5]).reshape([b, 16, 192])
        x = paddle.concat([self.token.expand([b, 1, 48]), self.proj(x)], 1) + self.where
        return self.fc(self.last(self.blocks(x))[:, 0])


def _vit() -> Any:
    return timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, mlp_ratio=2, num_classes=10
    ), Patches()


def _vit_truth(s: State) -> State:
    made = renamed(
        (r"^patch_embed\.", ""),
        (r"attn\.qkv", "att_in"),
        (r"attn\.proj", "att_out"),
        (r"mlp\.fc1", "ff.0"),
        (r"mlp\.fc2", "ff.2"),
        (r"norm1", "norms.0"),
        ("norm2", "norms.1"),
        (r"^norm\.", "last."),
        (r"^head\.", "fc."),
        (r"^cls_token", "token"),
        ("^pos_embed", "where"),
    )(s)
    made["proj.weight"] = made["proj.weight"].reshape(48, 192)
    made["token"], made["where"] = made["token"].reshape(48), made["where"].reshape(17, 48)
    return made


class TorchLM(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Embedding(64, 16)
        self.rnn = torch.nn.LSTM(16, 24, 2, batch_first=True)
        self.decoder = torch.nn.Linear(24, 64)

    def forward(self, input_ids: Any) -> Any:
        return self.decoder(self.rnn(self.encoder(input_ids))[0])


class Cell(paddle.nn.Layer):
    def __init__(self, i: int, h: int) -> None:
        super().__init__()
        self.x2h, self.h2h = L(i, 4 * h), L(h, 4 * h)

    def forward(self, x: Any, s: Any) -> Any:
        i, f, g, o = paddle.split(self.x2h(x) + self.h2h(s[0]), 4, -1)
        c = functional.sigmoid(f) * s[1] + functional.sigmoid(i) * paddle.tanh(g)
        return functional.sigmoid(o) * paddle.tanh(c), c


class CellLM(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embed = paddle.nn.Embedding(64, 16)
        self.cells = paddle.nn.LayerList([Cell(16, 24), Cell(24, 24)])
        self.logits = L(24, 64)

    def forward(self, input_ids: Any) -> Any:
        x = self.embed(input_ids)
        for cell in self.cells:
            s = (paddle.zeros([x.shape[0], 24]),) * 2
            out = []
            for t in range(x.shape[1]):
                s = cell(x[:, t], s)
                out.append(s[0])
            x = paddle.stack(out, 1)
        return self.logits(x)


_lm_truth = renamed(
    ("^encoder", "embed"),
    ("^decoder", "logits"),
    (r"rnn\.(\w+)_ih_l(\d)", r"cells.\2.x2h.\1"),
    (r"rnn\.(\w+)_hh_l(\d)", r"cells.\2.h2h.\1"),
)


class Mixed(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        conv = paddle.nn.Conv1D
        self.ch = paddle.nn.Sequential(L(32, 64), paddle.nn.GELU(), L(64, 32))
        self.tk = paddle.nn.Sequential(conv(16, 12, 1), paddle.nn.GELU(), conv(12, 16, 1))
        self.a, self.b = paddle.nn.LayerNorm(32, 1e-6), paddle.nn.LayerNorm(32, 1e-6)

    def forward(self, x: Any) -> Any:
        x = x + self.tk(self.a(x))
        return x + self.ch(self.b(x))


class Mixer(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.patch = paddle.nn.Conv2D(3, 32, 8, 8)
        self.body = paddle.nn.Sequential(*[Mixed() for _ in range(3)], paddle.nn.LayerNorm(32, 1e-6))
        self.fc = L(32, 10)

    def forward(self, x: Any) -> Any:
        return self.fc(self.body(self.patch(x).flatten(2).transpose([0, 2, 1])).mean(1))


def _mixer() -> Any:
    return timm.models.mlp_mixer.MlpMixer(
        num_classes=10, img_size=32, patch_size=8, num_blocks=3, embed_dim=32, mlp_ratio=(0.75 / 2, 2.0)
    ), Mixer()


def _mixer_truth(s: State) -> State:
    made = renamed(
        (r"^stem\.proj", "patch"),
        (r"^blocks\.", "body."),
        (r"mlp_tokens\.fc1", "tk.0"),
        (r"mlp_tokens\.fc2", "tk.2"),
        (r"mlp_channels\.fc1", "ch.0"),
        (r"mlp_channels\.fc2", "ch.2"),
        ("norm1", "a"),
        ("norm2", "b"),
        (r"^norm\.", "body.3."),
        ("^head", "fc"),
    )(s)
    return {k: v[..., None] if ".tk." in k and v.ndim == 2 else v for k, v in made.items()}


class TorchUNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        n = torch.nn

        def double(i: int, o: int) -> Any:
            return n.Sequential(
                n.Conv2d(i, o, 3, padding=1, bias=False),
                n.BatchNorm2d(o),
                n.ReLU(),
                n.Conv2d(o, o, 3, padding=1, bias=False),
                n.BatchNorm2d(o),
                n.ReLU(),
            )

        self.down1, self.down2, self.mid = double(3, 8), double(8, 16), double(16, 32)
        self.pool = n.MaxPool2d(2)
        self.up2, self.dec2 = n.ConvTranspose2d(32, 16, 2, 2), double(32, 16)
        self.up1, self.dec1 = n.ConvTranspose2d(16, 8, 2, 2), double(16, 8)
        self.head = n.Conv2d(8, 5, 1)

    def forward(self, x: Any) -> Any:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.mid(self.pool(b))
        d = self.dec2(torch.cat([b, self.up2(c)], 1))
        return self.head(self.dec1(torch.cat([a, self.up1(d)], 1)))


class Cbr(paddle.nn.Layer):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.bn = paddle.nn.BatchNorm2D(o)
        self.conv = paddle.nn.Conv2D(i, o, 3, padding=1, bias_attr=False)

    def forward(self, x: Any) -> Any:
        return functional.relu(self.bn(self.conv(x)))


class UNet(paddle.nn.Layer):
    """Recursive: each level holds the one below; the decoder is defined first."""

    def __init__(self, i: int = 3, o: int = 8, depth: int = 2, head: bool = True) -> None:
        super().__init__()
        if head:
            self.classify = paddle.nn.Conv2D(8, 5, 1)
        if depth:
            self.after = paddle.nn.Sequential(Cbr(2 * o, o), Cbr(o, o))
            self.grow = paddle.nn.Conv2DTranspose(2 * o, o, 2, 2)
            self.below = UNet(o, 2 * o, depth - 1, False)
        self.before = paddle.nn.Sequential(Cbr(i, o), Cbr(o, o))

    def forward(self, x: Any) -> Any:
        x = self.before(x)
        if hasattr(self, "below"):
            x = self.after(paddle.concat([x, self.grow(self.below(functional.max_pool2d(x, 2)))], 1))
        return self.classify(x) if hasattr(self, "classify") else x


def _unet_truth(s: State) -> State:
    made: State = {}
    where = {
        "down1": "before",
        "down2": "below.before",
        "mid": "below.below.before",
        "up1": "grow",
        "up2": "below.grow",
        "dec1": "after",
        "dec2": "below.after",
        "head": "classify",
    }
    for k, v in s.items():
        first, *rest = k.split(".")
        if len(rest) == 2:
            j = int(rest[0])
            rest = [str(j // 3), ("conv", "bn")[j % 3], rest[1]]
        made[".".join([where[first], *rest])] = v
    return renamed()(made)


class Tower(paddle.nn.Layer):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.stack = paddle.nn.Sequential(*[Enc(32, 48, 4, causal, True) for _ in range(2)])
        self.ln = paddle.nn.LayerNorm(32)
        self.proj = L(32, 24, bias_attr=False)


class Clip(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.see, self.read = Tower(False), Tower(True)
        self.see.pre = paddle.nn.LayerNorm(32)
        self.see.patch = paddle.nn.Conv2D(3, 32, 8, 8, bias_attr=False)
        self.see.cls = self.create_parameter([32])
        self.see.pos = paddle.nn.Embedding(17, 32)
        self.read.tok, self.read.pos = paddle.nn.Embedding(64, 32), paddle.nn.Embedding(16, 32)
        self.temperature = self.create_parameter([1])

    def forward(self, pixel_values: Any, input_ids: Any) -> Any:
        v, t = self.see, self.read
        x = v.patch(pixel_values).flatten(2).transpose([0, 2, 1])
        x = v.pre(paddle.concat([v.cls.expand([x.shape[0], 1, 32]), x], 1) + v.pos(paddle.arange(17)))
        x = v.proj(v.ln(v.stack(x)[:, 0]))
        y = t.ln(t.stack(t.tok(input_ids) + t.pos(paddle.arange(input_ids.shape[1]))))
        y = t.proj(paddle.stack([y[b, int(i)] for b, i in enumerate(input_ids.argmax(-1))]))
        x, y = (z / z.norm(axis=-1, keepdim=True) for z in (x, y))
        return x @ y.T * self.temperature.exp()


def _clip() -> Any:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    c = hf.CLIPConfig(
        text_config=dict(**tower, vocab_size=64, max_position_embeddings=16, eos_token_id=2),
        vision_config=dict(**tower, image_size=32, patch_size=8),
        projection_dim=24,
    )
    return hf.CLIPModel(c), Clip()


def _clip_inputs() -> Any:
    draw = np.random.default_rng(0)
    ids, pic = both(draw.integers(5, 64, (2, 9))), both(draw.standard_normal((2, 3, 32, 32)).astype("float32"))
    return tuple({"input_ids": ids[k], "pixel_values": pic[k]} for k in (0, 1))


def _clip_truth(s: State) -> State:
    made: State = {}
    for k, v in s.items():
        if ".q_proj" in k:
            made[k.replace("self_attn.q_proj", "att_in")] = np.concatenate(
                [s[k.replace("q_proj", f"{n}_proj")] for n in "qkv"]
            )
        elif ".k_proj" not in k and ".v_proj" not in k:
            made[k] = v
    made["logit_scale"] = s["logit_scale"].reshape(1)
    return renamed(
        (r"^vision_model", "see"),
        ("^text_model", "read"),
        (r"^visual_projection", "see.proj"),
        ("^text_projection", "read.proj"),
        (r"encoder\.layers", "stack"),
        (r"self_attn\.out_proj", "att_out"),
        (r"layer_norm1", "norms.0"),
        ("layer_norm2", "norms.1"),
        (r"mlp\.fc1", "ff.0"),
        (r"mlp\.fc2", "ff.2"),
        ("pre_layrnorm", "pre"),
        ("post_layernorm|final_layer_norm", "ln"),
        (r"embeddings\.", ""),
        ("class_embedding", "cls"),
        ("patch_embedding", "patch"),
        ("position_embedding", "pos"),
        ("token_embedding", "tok"),
        ("^logit_scale", "temperature"),
    )(made)


class Mha(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = L(32, 32), L(32, 32)
        self.k, self.v = L(32, 32, bias_attr=False), L(32, 32)

    def forward(self, x: Any, m: Any, causal: bool = False) -> Any:
        return self.o(_mix(_heads(self.q(x), 4), _heads(self.k(m), 4), _heads(self.v(m), 4), causal))


class Wh(paddle.nn.Layer):
    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.mha, self.mha_ln = Mha(), paddle.nn.LayerNorm(32)
        if cross:
            self.x, self.x_ln = Mha(), paddle.nn.LayerNorm(32)
        self.mlp = paddle.nn.Sequential(L(32, 48), paddle.nn.GELU(), L(48, 32))
        self.mlp_ln = paddle.nn.LayerNorm(32)

    def forward(self, x: Any, m: Any = None) -> Any:
        y = self.mha_ln(x)
        x = x + self.mha(y, y, m is not None)
        if m is not None:
            x = x + self.x(self.x_ln(x), m)
        return x + self.mlp(self.mlp_ln(x))


class Whisper(paddle.nn.Layer):
    """Decoder first; positions as bare parameters; as OpenAI's own code writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.text = paddle.nn.LayerList([Wh(True) for _ in range(2)])
        self.token_embedding = paddle.nn.Embedding(64, 32)
        self.text_pos = self.create_parameter([16, 32])
        self.text_ln = paddle.nn.LayerNorm(32)
        self.c1, self.c2 = paddle.nn.Conv1D(8, 32, 3, padding=1), paddle.nn.Conv1D(32, 32, 3, 2, padding=1)
        self.audio_pos = self.create_parameter([10, 32])
        self.audio = paddle.nn.LayerList([Wh(False) for _ in range(2)])
        self.audio_ln = paddle.nn.LayerNorm(32)

    def forward(self, input_features: Any, decoder_input_ids: Any) -> Any:
        m = functional.gelu(self.c2(functional.gelu(self.c1(input_features)))).transpose([0, 2, 1]) + self.audio_pos
        for b in self.audio:
            m = b(m)
        m = self.audio_ln(m)
        x = self.token_embedding(decoder_input_ids) + self.text_pos[: decoder_input_ids.shape[1]]
        for b in self.text:
            x = b(x, m)
        return self.text_ln(x)


def _whisper() -> Any:
    c = hf.WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=10,
        max_target_positions=16,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = hf.WhisperModel(c)
    model.requires_grad_(True)
    return model, Whisper()


def _whisper_inputs() -> Any:
    draw = np.random.default_rng(0)
    ids, mel = both(draw.integers(5, 64, (2, 9))), both(draw.standard_normal((2, 8, 20)).astype("float32"))
    return tuple({"decoder_input_ids": ids[k], "input_features": mel[k]} for k in (0, 1))


_whisper_truth = renamed(
    (r"encoder\.layers", "audio"),
    (r"decoder\.layers", "text"),
    (r"encoder\.conv", "c"),
    (r"encoder\.embed_positions\.weight", "audio_pos"),
    (r"decoder\.embed_positions\.weight", "text_pos"),
    (r"decoder\.embed_tokens", "token_embedding"),
    (r"^encoder\.layer_norm", "audio_ln"),
    (r"^decoder\.layer_norm", "text_ln"),
    (r"self_attn\.(.)\w*_proj", r"mha.\1"),
    ("self_attn_layer_norm", "mha_ln"),
    (r"encoder_attn\.(.)\w*_proj", r"x.\1"),
    ("encoder_attn_layer_norm", "x_ln"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
    ("final_layer_norm", "mlp_ln"),
)

PAIRS = [
    Pair("handwritten/gpt_neox", _neox, tokens(), truth=_neox_truth),
    Pair("handwritten/phi3", _phi, tokens(), truth=_phi_truth),
    Pair("handwritten/vit_patch_linear", _vit, images(32), truth=_vit_truth),
    Pair("handwritten/lstm_lm", lambda: (TorchLM(), CellLM()), tokens(), truth=_lm_truth),
    Pair("handwritten/mixer", _mixer, images(32), truth=_mixer_truth),
    Pair("handwritten/unet", lambda: (TorchUNet(), UNet()), images(32), truth=_unet_truth),
    Pair("handwritten/clip", _clip, _clip_inputs, truth=_clip_truth),
    Pair("handwritten/whisper", _whisper, _whisper_inputs, truth=_whisper_truth),
]
