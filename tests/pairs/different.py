"""Pairs that do not compute the same function, each for one reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from kit.frameworks import PADDLE, TORCH
from kit.nets import attend

from .pair import links, normal, pair

ROWS = (normal(2, 5, 16),)
IMAGES = (normal(2, 3, 9, 9),)


@dataclass(frozen=True)
class Text:
    """What a small transformer is like. Tuples have one entry for each block."""

    width: int = 16
    hidden: tuple = (24, 24)
    heads: int = 4
    causal: bool = False
    approximate: bool = False
    eps: float = 1e-6
    norm: str = "layer"
    pre_norm: bool = True
    final_norm: bool = True
    residual: tuple = (True, True, True)
    bias: tuple = (True, True, True)
    tanh: bool = True


def norm_of(kit, spec):
    class OwnNorm(kit.Net):
        def build(self):
            self.gamma = kit.param(spec.width)
            if spec.norm != "rms":
                self.beta = kit.param(spec.width)

        def forward(self, x):
            if spec.norm == "own":
                x = x - x.mean(-1, keepdim=True)
            x = x / kit.sqrt((x * x).mean(-1, keepdim=True) + spec.eps) * self.gamma
            return x if spec.norm == "rms" else x + self.beta

    return kit.layernorm(spec.width, eps=spec.eps) if spec.norm == "layer" else OwnNorm()


def nested_text(kit, spec=Text()):
    """The reference: nested, activations as layers."""

    class Attention(kit.Net):
        def build(self):
            self.num_heads = spec.heads
            for name in "qkvo":
                setattr(self, f"{name}_proj", kit.linear(spec.width, spec.width))

        def forward(self, x):
            heads = attend(kit, self.q_proj(x), self.k_proj(x), self.v_proj(x), spec.heads, spec.causal)
            return self.o_proj(heads)

    class Gelu(kit.Layer):
        def forward(self, x):
            return kit.gelu(x, spec.approximate)

    class Block(kit.Net):
        def build(self, hidden, residual, bias):
            self.residual = residual
            self.norm1, self.attn, self.norm2 = norm_of(kit, spec), Attention(), norm_of(kit, spec)
            self.fc1, self.act, self.fc2 = kit.linear(spec.width, hidden, bias), Gelu(), kit.linear(hidden, spec.width)

        def mlp(self, x):
            return self.fc2(self.act(self.fc1(x)))

        def forward(self, x):
            if not spec.pre_norm:
                x = self.norm1(x + self.attn(x))
                return self.norm2(x + self.mlp(x))
            x = x + self.attn(self.norm1(x))
            out = self.mlp(self.norm2(x))
            return x + out if self.residual else out

    class Net(kit.Net):
        def build(self):
            self.embed = kit.linear(16, spec.width, bias=False)
            self.blocks = kit.List([Block(*each) for each in zip(spec.hidden, spec.residual, spec.bias)])
            self.norm = norm_of(kit, spec) if spec.final_norm else kit.Identity()
            self.pooler = kit.linear(spec.width, spec.width)
            self.tanh = kit.Tanh() if spec.tanh else kit.Identity()
            self.head = kit.linear(spec.width, 3)

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.tanh(self.pooler(self.norm(x)[:, 0])))

    return Net()


def flat_text(kit, spec=Text()):
    """The candidate: flat blocks, norms last, activations as functions."""

    class Layer(kit.Net):
        def build(self, hidden, residual, bias):
            self.residual, self.num_heads = residual, spec.heads
            for name in ("out_lin", "k_lin", "v_lin", "q_lin"):
                setattr(self, name, kit.linear(spec.width, spec.width))
            self.linear1, self.linear2 = kit.linear(spec.width, hidden, bias), kit.linear(hidden, spec.width)
            self.ln_1, self.ln_2 = norm_of(kit, spec), norm_of(kit, spec)

        def attention(self, x):
            heads = attend(kit, self.q_lin(x), self.k_lin(x), self.v_lin(x), spec.heads, spec.causal)
            return self.out_lin(heads)

        def mlp(self, x):
            return self.linear2(kit.gelu(self.linear1(x), spec.approximate))

        def forward(self, x):
            if not spec.pre_norm:
                x = self.ln_1(x + self.attention(x))
                return self.ln_2(x + self.mlp(x))
            x = x + self.attention(self.ln_1(x))
            out = self.mlp(self.ln_2(x))
            return x + out if self.residual else out

    class Net(kit.Net):
        def build(self):
            self.classifier, self.pool = kit.linear(spec.width, 3), kit.linear(spec.width, spec.width)
            if spec.final_norm:
                self.ln_f = norm_of(kit, spec)
            self.layer = kit.Sequential(*(Layer(*each) for each in zip(spec.hidden, spec.residual, spec.bias)))
            self.input_projection = kit.linear(16, spec.width, bias=False)

        def forward(self, x):
            x = self.layer(self.input_projection(x))
            x = self.pool((self.ln_f(x) if spec.final_norm else x)[:, 0])
            return self.classifier(kit.tanh(x) if spec.tanh else x)

    return Net()


TEXT = links(
    """
    embed                  input_projection
    blocks.{i}.attn.q_proj   layer.{i}.q_lin
    blocks.{i}.attn.k_proj   layer.{i}.k_lin
    blocks.{i}.attn.v_proj   layer.{i}.v_lin
    blocks.{i}.attn.o_proj   layer.{i}.out_lin
    blocks.{i}.norm1         layer.{i}.ln_1
    blocks.{i}.norm2         layer.{i}.ln_2
    blocks.{i}.fc1           layer.{i}.linear1
    blocks.{i}.fc2           layer.{i}.linear2
    norm                   ln_f
    pooler                 pool
    head                   classifier
    """
)
NORMLESS = tuple(entry for entry in TEXT if entry[0] != "norm")
THIRD_OURS = tuple(reference.replace(".1.", ".2.") for reference, _ in TEXT if ".1." in reference)
THIRD_THEIRS = tuple(candidate.replace(".1.", ".2.") for _, candidate in TEXT if ".1." in candidate)


@dataclass(frozen=True)
class Image:
    """What a small convolutional net is like."""

    width: int = 8
    size: int = 3
    stride: int = 2
    dilation: int = 1
    padding_mode: str = "zeros"
    six: bool = False
    eps: float = 1e-5
    momentum: float = 0.1
    norm_first: bool = True
    residual: bool = True


def _conv(kit, spec, inputs, outputs):
    how = {"padding": spec.size // 2 * spec.dilation, "dilation": spec.dilation, "padding_mode": spec.padding_mode}
    return kit.conv(inputs, outputs, spec.size, bias=False, **how)


def _norm(kit, spec):
    return kit.batchnorm(spec.width, eps=spec.eps, momentum=spec.momentum)


def nested_image(kit, spec=Image()):
    """The reference: nested, activations as layers."""

    class Block(kit.Net):
        def build(self):
            self.conv, self.bn = _conv(kit, spec, spec.width, spec.width), _norm(kit, spec)
            self.act = kit.ReLU6() if spec.six else kit.ReLU()

        def forward(self, x):
            out = self.act(self.bn(self.conv(x))) if spec.norm_first else self.bn(self.act(self.conv(x)))
            return x + out if spec.residual else out

    return kit.net(
        lambda net, x: net.fc(net.layers(net.stem(x)).mean((2, 3))),
        stem=kit.conv(3, spec.width, 3, stride=spec.stride, padding=1),
        layers=kit.Sequential(Block(), Block()),
        fc=kit.linear(spec.width, 4),
    )


def flat_image(kit, spec=Image()):
    """The candidate: flat, norms last, activations as functions."""

    class Net(kit.Net):
        def build(self):
            self.logits = kit.linear(spec.width, 4)
            self.patch = kit.conv(3, spec.width, 3, stride=spec.stride, padding=1)
            self.conv1, self.conv2 = (_conv(kit, spec, spec.width, spec.width) for _ in range(2))
            self.norm1, self.norm2 = _norm(kit, spec), _norm(kit, spec)

        def forward(self, x):
            x = self.patch(x)
            act = kit.relu6 if spec.six else kit.relu
            for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
                out = act(norm(conv(x))) if spec.norm_first else norm(act(conv(x)))
                x = x + out if spec.residual else out
            return self.logits(x.mean((2, 3)))

    return Net()


IMAGE = links("stem patch\n fc logits") + tuple(
    (f"layers.{index}.{reference}", f"{candidate}{index + 1}")
    for index in (0, 1)
    for reference, candidate in (("conv", "conv"), ("bn", "norm"))
)


def text(name, differs, reference=None, scale=1.0, layers=TEXT, **more):
    """A pair of transformers; ``more`` is what the candidate has otherwise, or fields of the pair."""
    fields = {key: more.pop(key) for key in ("extra", "transfer", "kits") if key in more}
    base = replace(Text(), **(reference or {}))
    both = partial(nested_text, spec=base), partial(flat_text, spec=replace(base, **more))
    return pair(name, *both, (ROWS[0] * scale,), layers, same=False, differs=differs, **fields)


def image(name, differs, reference=None, scale=1.0, **more):
    """The same of convolutional nets."""
    fields = {key: more.pop(key) for key in ("shows", "transfer", "kits") if key in more}
    base = replace(Image(), **(reference or {}))
    both = partial(nested_image, spec=base), partial(flat_image, spec=replace(base, **more))
    return pair(name, *both, (IMAGES[0] * scale,), IMAGE, same=False, differs=differs, **fields)


BOTH = (
    # The two styles do compute the same function where nothing differs.
    pair("text_without_difference", nested_text, flat_text, ROWS, TEXT),
    # A LayerNorm class with gamma and beta for the framework's.
    pair("own_layernorm", nested_text, partial(flat_text, spec=Text(norm="own")), ROWS, TEXT),
    pair("image_without_difference", nested_image, flat_image, IMAGES, IMAGE),
)

PAIRS = (
    # The candidate has one block more; which one is the spare can't be reported: here the last.
    text("one_block_more", "blocks", hidden=(24, 24, 24), extra=((), THIRD_THEIRS)),
    # The candidate has one block fewer, torch against torch.
    text(
        "one_block_fewer",
        "blocks.2",
        reference={"hidden": (24, 24, 24)},
        hidden=(24, 24),
        extra=(THIRD_OURS, ()),
        kits=(TORCH, TORCH),
    ),
    # Another hidden width in the second block.
    text("width_of_one_layer", "blocks.1.fc1", hidden=(24, 32)),
    # Another width everywhere.
    text("width_everywhere", "embed", width=32),
    # No bias in one layer.
    text("bias_missing", "blocks.1.fc1", bias=(True, False)),
    # gelu's approximation by tanh; no parameter tells.
    text("gelu_by_tanh", "blocks.0.act", approximate=True),
    # The norm's epsilon, 1e-6 against 1e-5, with small inputs.
    text("layernorm_epsilon", "blocks.0.norm1", scale=1e-3, eps=1e-5),
    # The norm's epsilon, 1e-6 against 1e-12, paddle against torch.
    text("layernorm_epsilon_tiny", "blocks.0.norm1", scale=1e-3, eps=1e-12, kits=(PADDLE, TORCH)),
    # Another number of heads, with the same shapes of weights.
    text("number_of_heads", "blocks.0.attn", heads=2),
    # A causal mask on one side.
    text("causal_mask", "blocks.0.attn", causal=True),
    # Norms after the sum instead of before the layer.
    text("post_norm", "blocks.0.norm1", pre_norm=False),
    # No norm at the end.
    text("final_norm_missing", "norm", final_norm=False, layers=NORMLESS, extra=(("norm",), ())),
    # No residual around the second MLP.
    text("residual_missing", "blocks.1", residual=(True, False)),
    # RMSNorm, which has no bias, for LayerNorm.
    text("rmsnorm", "blocks.0.norm1", norm="rms"),
    # A LayerNorm of one's own with all parameters, that forgets to subtract the mean.
    text("norm_not_centred", "blocks.0.norm1", reference={"norm": "own"}, norm="flawed"),
    # No tanh after the pooler.
    text("tanh_missing", "tanh", tanh=False),
    # Another kernel size.
    image("kernel_size", "layers.0.conv", size=5),
    # The same weights with a dilation.
    image("dilation", "layers.0.conv", dilation=2),
    # Another stride with the same shapes of weights.
    image("stride", "stem", stride=1),
    # relu6 for relu, with large inputs.
    image("relu6", "layers.0.act", scale=5.0, six=True),
    # Another padding mode.
    image("padding_mode", "layers.0.conv", padding_mode="reflect"),
    # BatchNorm's epsilon, 1e-5 against 1e-3, as Keras has it; paddle against paddle.
    image("batchnorm_epsilon", "layers.0.bn", eps=1e-3, kits=(PADDLE, PADDLE)),
    # BatchNorm's momentum; shows only after training.
    image("batchnorm_momentum", "layers.0.bn", momentum=0.5, shows="training"),
    # The activation before the norm.
    image("relu_before_norm", "layers.0.bn", norm_first=False),
    # No residual at all.
    image("no_residuals", "layers.0", residual=False),
)
