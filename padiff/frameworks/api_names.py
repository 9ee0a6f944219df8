"""Names of functional calls under which the two frameworks' records can be paired."""

from __future__ import annotations

# What a framework calls it -> the common name. Names that both share are not listed; in-place forms lose their `_`.
_COMMON = {
    "add": "add",
    "__add__": "add",
    "__radd__": "add",
    "__iadd__": "add",
    "__sub__": "sub",
    "__rsub__": "rsub",
    "subtract": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "multiply": "mul",
    "__div__": "div",
    "__truediv__": "div",
    "__rdiv__": "rdiv",
    "__rtruediv__": "rdiv",
    "divide": "div",
    "true_divide": "div",
    "__matmul__": "matmul",
    "__pow__": "pow",
    "__neg__": "neg",
    "negative": "neg",
    "concat": "cat",
    "concatenate": "cat",
    "bmm": "matmul",
    "mm": "matmul",
    "silu": "swish",
    "clip": "clamp",
    "upsample": "interpolate",
    "softmax_with_cross_entropy": "cross_entropy",
}

_ARITHMETIC = (
    "add", "sub", "rsub", "mul", "div", "rdiv", "matmul", "pow", "neg", "cat", "einsum", "mean", "sum", "max",
    "min", "prod", "var", "std", "norm", "exp", "log", "sqrt", "rsqrt", "abs", "sin", "cos", "cumsum", "clamp",
    "where", "maximum", "minimum", "masked_fill", "logsumexp",
)  # fmt: skip
_LAYERS = (
    "linear", "bilinear", "embedding", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "conv1d_transpose", "conv2d_transpose", "conv3d_transpose", "layer_norm", "batch_norm",
    "group_norm", "instance_norm", "local_response_norm", "normalize", "rms_norm", "dropout", "dropout2d",
    "dropout3d", "alpha_dropout", "interpolate", "pad", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "adaptive_max_pool2d", "grid_sample", "pixel_shuffle", "unfold", "fold", "scaled_dot_product_attention",
)  # fmt: skip
_ACTIVATIONS = (
    "softmax", "log_softmax", "sigmoid", "tanh", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu",
    "swish", "mish", "hardswish", "hardsigmoid", "hardtanh", "softplus", "prelu", "glu",
)  # fmt: skip
_LOSSES = (
    "cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "nll_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div",
)  # fmt: skip

#: Calls that compute something. Those that only look at the same values differently (reshape, transpose, indexing) are
#: written differently by everybody, and are not recorded.
COMPUTING = frozenset((*_ARITHMETIC, *_LAYERS, *_ACTIVATIONS, *_LOSSES))

_TRANSPOSED = {f"conv{n}d_transpose": f"conv_transpose{n}d" for n in (1, 2, 3)}


def common_name(name: str) -> str | None:
    """The common name of a functional call; `None` for a call that computes nothing, or that is not known."""
    bare = name if name.startswith("__") else name.rstrip("_")
    bare = bare.removeprefix("linalg_").removeprefix("special_")  # torch's own names of torch.linalg.norm and others
    bare = _COMMON.get(bare, bare)
    return _TRANSPOSED.get(bare, bare) if bare in COMPUTING else None
