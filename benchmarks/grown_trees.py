"""Pairs of layer trees of any size with a known map, made without a framework: what `alignment.py` measures growth on.

A tree is written down as its leaves, in order of definition, each with a key; leaves with the same key answer to each
other. A leaf of which the other side has several parts bears their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from padiff.records import ROOT, Layer, Parameter, RunInfo

#: Path, layer, and the keys of what it holds (none: it has no parameters).
Leaf = tuple[Layer, tuple[str, ...]]

_WIDTH = 64


@dataclass(frozen=True)
class Grown:
    """Two trees and which of their layers answer to each other."""

    reference: RunInfo
    candidate: RunInfo
    truth: frozenset[tuple[str, str]]


def _parameters(*shapes: tuple[int, ...], layout: str = "") -> tuple[Parameter, ...]:
    named = zip(("weight", "bias"), shapes)
    return tuple(Parameter(slot, s, "float32", layout=layout if len(s) == 2 else "") for slot, s in named)


def _linear(path: str, inputs: int, outputs: int, paddle: bool, *keys: str) -> Leaf:
    shape, layout = ((inputs, outputs), "in_out") if paddle else ((outputs, inputs), "out_in")
    return Layer(path, "Linear", "linear", _parameters(shape, (outputs,), layout=layout)), keys


def _conv(path: str, inputs: int, outputs: int, size: int, paddle: bool, key: str) -> Leaf:
    name = "Conv2D" if paddle else "Conv2d"
    return Layer(path, name, "conv2d", _parameters((outputs, inputs, size, size))), (key,)


def _batch_norm(path: str, channels: int, paddle: bool, key: str) -> Leaf:
    statistics = ("_mean", "_variance") if paddle else ("running_mean", "running_var")
    owned = _parameters((channels,), (channels,))
    owned += tuple(Parameter(slot, (channels,), "float32", role="buffer") for slot in statistics)
    return Layer(path, "BatchNorm2D" if paddle else "BatchNorm2d", "batchnorm2d", owned), (key,)


def _layer_norm(path: str, key: str) -> Leaf:
    return Layer(path, "LayerNorm", "layernorm", _parameters((_WIDTH,), (_WIDTH,))), (key,)


def _embedding(path: str, rows: int, key: str) -> Leaf:
    return Layer(path, "Embedding", "embedding", _parameters((rows, _WIDTH))), (key,)


def _plain(path: str, kind: str) -> Leaf:
    return Layer(path, kind, kind.lower()), ()


def _tree(leaves: Iterator[Leaf], framework: str) -> tuple[RunInfo, dict[str, str]]:
    """A run's tree, with the layers above the leaves, and the paths by key."""
    layers: dict[str, Layer] = {ROOT: Layer(ROOT, "Model", "model")}
    path_of: dict[str, str] = {}
    for leaf, keys in leaves:
        parts = leaf.path.split(".")
        for k in range(1, len(parts)):
            above = ".".join(parts[:k])
            layers.setdefault(above, Layer(above, f"Holds{parts[k - 1].title()}", "module"))
        layers[leaf.path] = leaf
        path_of.update(dict.fromkeys(keys, leaf.path))
    children = dict.fromkeys(layers, 0)
    for path in layers:
        if path != ROOT:
            children[path.rpartition(".")[0] or ROOT] += 1
    told = tuple(replace(layer, children=children[path]) for path, layer in layers.items())
    return RunInfo(framework=framework, framework_version="0", layers=told), path_of


def _grown(in_torch: Iterator[Leaf], in_paddle: Iterator[Leaf]) -> Grown:
    (reference, first), (candidate, second) = _tree(in_torch, "torch"), _tree(in_paddle, "paddle")
    assert first.keys() == second.keys()
    return Grown(reference, candidate, frozenset((first[key], second[key]) for key in first))


def transformer(layers: int) -> Grown:
    """Encoder blocks: BERT's names, nesting and order of definition against flatter ones in another order."""
    blocks = max(1, (layers - 6) // 14)

    def in_torch() -> Iterator[Leaf]:
        w = _WIDTH
        yield _embedding("embeddings.word_embeddings", 1000, "token")
        yield _embedding("embeddings.position_embeddings", 128, "position")
        for i in range(blocks):
            at = f"encoder.layer.{i}"
            for name in ("query", "key", "value"):
                yield _linear(f"{at}.attention.self.{name}", w, w, False, f"{i}.{name}")
            yield _linear(f"{at}.attention.output.dense", w, w, False, f"{i}.out")
            yield _layer_norm(f"{at}.attention.output.LayerNorm", f"{i}.norm1")
            yield _linear(f"{at}.intermediate.dense", w, 4 * w, False, f"{i}.up")
            yield _plain(f"{at}.intermediate.act", "GELU")
            yield _linear(f"{at}.output.dense", 4 * w, w, False, f"{i}.down")
            yield _layer_norm(f"{at}.output.LayerNorm", f"{i}.norm2")
        yield _linear("classifier", w, 10, False, "head")

    def in_paddle() -> Iterator[Leaf]:
        w = _WIDTH
        yield _linear("fc", w, 10, True, "head")
        for i in range(blocks):
            at = f"trunk.stack.{i}"
            yield _linear(f"{at}.ffn.lin2", 4 * w, w, True, f"{i}.down")
            yield _linear(f"{at}.ffn.lin1", w, 4 * w, True, f"{i}.up")
            yield _plain(f"{at}.ffn.activation", "GELU")
            yield _layer_norm(f"{at}.ln1", f"{i}.norm1")
            yield _layer_norm(f"{at}.ln2", f"{i}.norm2")
            for name, called in (("value", "v"), ("key", "k"), ("query", "q"), ("out", "o")):
                yield _linear(f"{at}.mha.{called}_proj", w, w, True, f"{i}.{name}")
        yield _embedding("pos_embed", 128, "position")
        yield _embedding("tok_embed", 1000, "token")

    return _grown(in_torch(), in_paddle())


def resnet(layers: int) -> Grown:
    """Bottlenecks in four stages: torchvision's names against a layer around each convolution and its norm."""
    blocks = max(1, (layers - 17) // 4 // 8)
    widths = (16, 32, 64, 128)

    def in_torch() -> Iterator[Leaf]:
        yield _conv("conv1", 3, 16, 7, False, "stem.c")
        yield _batch_norm("bn1", 16, False, "stem.n")
        before = 16
        for s, width in enumerate(widths):
            for i in range(blocks):
                at, steps = f"layer{s + 1}.{i}", ((before, width, 1), (width, width, 3), (width, 4 * width, 1))
                for k, (inputs, outputs, size) in enumerate(steps):
                    yield _conv(f"{at}.conv{k + 1}", inputs, outputs, size, False, f"{s}.{i}.{k}.c")
                    yield _batch_norm(f"{at}.bn{k + 1}", outputs, False, f"{s}.{i}.{k}.n")
                yield _plain(f"{at}.relu", "ReLU")
                if i == 0:
                    yield _conv(f"{at}.downsample.0", before, 4 * width, 1, False, f"{s}.{i}.s.c")
                    yield _batch_norm(f"{at}.downsample.1", 4 * width, False, f"{s}.{i}.s.n")
                before = 4 * width
        yield _linear("fc", before, 10, False, "head")

    def in_paddle() -> Iterator[Leaf]:
        yield _conv("stem.conv", 3, 16, 7, True, "stem.c")
        yield _batch_norm("stem.norm", 16, True, "stem.n")
        before = 16
        for s, width in enumerate(widths):
            for i in range(blocks):
                at, steps = f"stages.{s}.units.{i}", ((before, width, 1), (width, width, 3), (width, 4 * width, 1))
                if i == 0:
                    yield _conv(f"{at}.short.conv", before, 4 * width, 1, True, f"{s}.{i}.s.c")
                    yield _batch_norm(f"{at}.short.norm", 4 * width, True, f"{s}.{i}.s.n")
                for k, (inputs, outputs, size) in enumerate(steps):
                    yield _conv(f"{at}.body.{k}.conv", inputs, outputs, size, True, f"{s}.{i}.{k}.c")
                    yield _batch_norm(f"{at}.body.{k}.norm", outputs, True, f"{s}.{i}.{k}.n")
                before = 4 * width
        yield _linear("head", before, 10, True, "head")

    return _grown(in_torch(), in_paddle())


def flat(layers: int) -> Grown:
    """One Sequential of equal linear layers, against the same under other names: no structure helps."""
    count = layers - 1

    def tree(name: str, paddle: bool) -> Iterator[Leaf]:
        return (_linear(f"{name}{i}", _WIDTH, _WIDTH, paddle, str(i)) for i in range(count))

    return _grown(tree("", False), tree("fc", True))


def shuffled(layers: int) -> Grown:
    """As `flat`, but the candidate defines its layers in another order: only the numbers in the names tell."""
    order = np.random.default_rng(0).permutation(layers - 1).tolist()
    in_torch = (_linear(f"{i}", _WIDTH, _WIDTH, False, str(i)) for i in range(layers - 1))
    return _grown(in_torch, (_linear(f"fc{i}", _WIDTH, _WIDTH, True, str(i)) for i in order))


def fused(layers: int) -> Grown:
    """GPT-2's blocks, query, key and value in one matrix, against blocks that have three."""
    blocks = max(1, (layers - 5) // 10)

    def in_torch() -> Iterator[Leaf]:
        w = _WIDTH
        yield _embedding("wte", 1000, "token")
        yield _embedding("wpe", 128, "position")
        for i in range(blocks):
            at = f"h.{i}"
            yield _layer_norm(f"{at}.ln_1", f"{i}.norm1")
            yield _linear(f"{at}.attn.c_attn", w, 3 * w, False, f"{i}.q", f"{i}.k", f"{i}.v")
            yield _linear(f"{at}.attn.c_proj", w, w, False, f"{i}.out")
            yield _layer_norm(f"{at}.ln_2", f"{i}.norm2")
            yield _linear(f"{at}.mlp.c_fc", w, 4 * w, False, f"{i}.up")
            yield _plain(f"{at}.mlp.act", "GELU")
            yield _linear(f"{at}.mlp.c_proj", 4 * w, w, False, f"{i}.down")
        yield _layer_norm("ln_f", "norm")

    def in_paddle() -> Iterator[Leaf]:
        w = _WIDTH
        yield _embedding("embed.tokens", 1000, "token")
        yield _embedding("embed.positions", 128, "position")
        for i in range(blocks):
            at = f"decoder.blocks.{i}"
            for name in ("q", "k", "v", "out"):
                yield _linear(f"{at}.self_attn.{name}_proj", w, w, True, f"{i}.{name}")
            yield _linear(f"{at}.fc1", w, 4 * w, True, f"{i}.up")
            yield _plain(f"{at}.act", "GELU")
            yield _linear(f"{at}.fc2", 4 * w, w, True, f"{i}.down")
            yield _layer_norm(f"{at}.norm1", f"{i}.norm1")
            yield _layer_norm(f"{at}.norm2", f"{i}.norm2")
        yield _layer_norm("final_norm", "norm")

    return _grown(in_torch(), in_paddle())


GROWN: dict[str, Callable[[int], Grown]] = {
    "transformer": transformer,
    "resnet": resnet,
    "flat": flat,
    "flat, shuffled": shuffled,
    "fused qkv": fused,
}
