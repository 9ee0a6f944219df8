"""Copying weights by hand, layer by layer and by name: knows the frameworks' layouts, and nothing of padiff."""

from __future__ import annotations

import numpy as np
import paddle
import torch
from kit.frameworks import kit_of


class MismatchError(Exception):
    """What one layer owns has no place in the other."""


_COMMON = {
    "gamma": "weight",
    "scale": "weight",
    "g": "weight",
    "beta": "bias",
    "shift": "bias",
    "moving_mean": "running_mean",
    "_mean": "running_mean",
    "moving_variance": "running_var",
    "_variance": "running_var",
}

_CONVS = (torch.nn.Conv1d, torch.nn.Conv2d, paddle.nn.Conv1D, paddle.nn.Conv2D)


def layer(model, path):
    found = model
    for part in [] if path == "(root)" else path.split("."):
        if isinstance(found, (paddle.nn.LayerDict, torch.nn.ModuleDict)):
            found = found[part]
        else:
            found = getattr(found, part)
    return found


def tensors(owner):
    """What a layer owns itself: parameters and statistics, under common names."""
    found = {**owner._parameters, **owner._buffers}
    kept = {name: value for name, value in found.items() if value is not None and "float" in str(value.dtype)}
    return {_COMMON.get(name, name): value for name, value in kept.items() if "mask" not in name}


def in_out(owner):
    """Whether a layer's matrix is (in, out)."""
    return isinstance(owner, paddle.nn.Linear) or type(owner).__name__ == "Conv1D"


def _is_dense(owner):
    linear = isinstance(owner, (torch.nn.Linear, paddle.nn.Linear)) or type(owner).__name__ == "Conv1D"
    return linear or (isinstance(owner, _CONVS) and set(owner.weight.shape[2:]) == {1})


def value(model, path, name):
    """One tensor of a layer as numpy."""
    owned = tensors(layer(model, path))
    if name not in owned:
        raise MismatchError(f"{path} has no {name}")
    return kit_of(model).numpy(owned[name])


def put(model, path, name, array):
    owned = tensors(layer(model, path))
    if name not in owned or tuple(owned[name].shape) != array.shape:
        raise MismatchError(f"{path} has no {name} of shape {array.shape}")
    kit_of(model).set(owned[name], np.ascontiguousarray(array))


def dense(model, path):
    """The matrix (out, in) and the bias or `None` of a linear layer, whatever its class."""
    owner, matrix = layer(model, path), value(model, path, "weight")
    matrix = matrix.reshape(matrix.shape[:2])
    bias = value(model, path, "bias") if "bias" in tensors(owner) else None
    return (matrix.T if in_out(owner) else matrix), bias


def put_dense(model, path, matrix, bias):
    owner = layer(model, path)
    if (bias is None) != ("bias" not in tensors(owner)):
        raise MismatchError(f"{path}: one has a bias")
    matrix = matrix.T if in_out(owner) else matrix
    ones = (1,) * (len(owner.weight.shape) - 2)
    put(model, path, "weight", matrix.reshape((*matrix.shape, *ones)))
    if bias is not None:
        put(model, path, "bias", bias)


def same(ref, reference, cand, candidate):
    """Copy one layer onto another that does the same."""
    if _is_dense(layer(ref, reference)) and _is_dense(layer(cand, candidate)):
        put_dense(cand, candidate, *dense(ref, reference))
        return
    names = tensors(layer(ref, reference)).keys()
    if names != tensors(layer(cand, candidate)).keys():
        raise MismatchError(f"{reference} and {candidate} own different things")
    for name in names:
        put(cand, candidate, name, value(ref, reference, name))


def fuse(ref, reference, cand, candidate):
    """Several linear layers below each other in one."""
    matrices, biases = zip(*(dense(ref, path) for path in reference))
    put_dense(cand, candidate, np.concatenate(matrices), None if biases[0] is None else np.concatenate(biases))


def split(ref, reference, cand, candidate):
    """One linear layer as several of equal size."""
    matrix, bias = dense(ref, reference)
    biases = [None] * len(candidate) if bias is None else np.split(bias, len(candidate))
    for path, part, its_bias in zip(candidate, np.split(matrix, len(candidate)), biases):
        put_dense(cand, path, part, its_bias)


def interleave(ref, reference, cand, candidate, heads):
    """Several linear layers in one, whose rows are (head, which, dimension)."""
    matrices, biases = zip(*(dense(ref, path) for path in reference))
    width = matrices[0].shape[1]
    matrix = np.stack([m.reshape((heads, -1, width)) for m in matrices], 1).reshape((-1, width))
    put_dense(cand, candidate, matrix, np.stack([b.reshape((heads, -1)) for b in biases], 1).reshape(-1))


def unpack(ref, reference, cand, candidate):
    """torch's packed attention as linear layers for query, key and value."""
    matrices = np.split(value(ref, reference, "in_proj_weight"), 3)
    for path, matrix, bias in zip(candidate, matrices, np.split(value(ref, reference, "in_proj_bias"), 3)):
        put_dense(cand, path, matrix, bias)


def part_heads(ref, reference, cand, candidate, heads):
    """One linear layer, whose rows are (head, which, dimension), as several."""
    matrix, bias = dense(ref, reference)
    width, count = matrix.shape[1], len(candidate)
    matrix, bias = matrix.reshape((heads, count, -1, width)), bias.reshape((heads, count, -1))
    for which, path in enumerate(candidate):
        put_dense(cand, path, matrix[:, which].reshape((-1, width)), bias[:, which].reshape(-1))
