"""Common names of functions and operators, under which the records of the two frameworks can be paired."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A framework's name of a function -> the common name. Names that both frameworks share are not listed; in-place forms
# lose their `_`.
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

#: Functions that compute new values. Functions that only view the same values differently (reshape, transpose,
#: indexing) are not recorded, because equal models use them differently.
COMPUTING = frozenset((*_ARITHMETIC, *_LAYERS, *_ACTIVATIONS, *_LOSSES))

_TRANSPOSED = {f"conv{n}d_transpose": f"conv_transpose{n}d" for n in (1, 2, 3)}


def common_name(name: str) -> str | None:
    """Return the common name of a function; `None` if the function computes no new values or is unknown."""
    bare = name if name.startswith("__") else name.rstrip("_")
    bare = bare.removeprefix("linalg_").removeprefix("special_")  # torch's own names of torch.linalg.norm and others
    bare = _COMMON.get(bare, bare)
    return _TRANSPOSED.get(bare, bare) if bare in COMPUTING else None


# -- functions in traces -------------------------------------------------------------------------------------------

#: Functions in a trace that compute no new values: they view, copy or select the values of a tensor.
LOOKING = frozenset((
    "reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as",
    "broadcast_to", "transpose", "permute", "movedim", "contiguous", "cast", "to", "clone", "detach", "getitem",
    "split", "chunk", "unbind", "narrow", "select", "tile", "repeat", "repeat_interleave", "slice", "index_select",
    "gather", "take_along_axis", "view_as_real", "view_as_complex", "assign",
))  # fmt: skip
_MAKING = (
    "zeros", "ones", "full", "arange", "linspace", "eye", "zeros_like", "ones_like", "full_like", "tensor", "triu",
    "tril", "outer", "one_hot",
)  # fmt: skip
_DECIDING = (
    "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and",
    "bitwise_or", "isnan", "isinf", "sign", "topk", "sort", "argmax", "argmin", "argsort",
)  # fmt: skip
_FURTHER = (
    "addmm", "baddbmm", "square", "pow", "erf", "stack", "roll", "flip", "tan", "atan", "sinh", "cosh", "expm1",
    "log1p", "floor", "round", "ceil", "remainder", "reciprocal", "logsigmoid", "hardshrink", "softshrink", "softsign",
    "tanhshrink", "masked_select", "scatter", "setitem", "copy", "multi_head_attention_forward", "polar", "dot",
    "cumprod", "median", "dist", "cdist", "cosine_similarity", "unfold", "meshgrid", "adaptive_max_pool1d",
    "adaptive_max_pool3d", "rrelu", "threshold", "bucketize", "scale", "lerp", "addcmul", "addcdiv", "masked_scatter",
    "index_add", "scatter_add", "put_along_axis", "log10", "log2", "acos", "asin", "acosh", "asinh", "atanh", "atan2",
    "diff", "diagonal", "logaddexp", "hypot", "nan_to_num", "var_mean", "std_mean", "clamp_min", "clamp_max", "logit",
    "erfc", "index_put", "pairwise_distance", "margin_ranking_loss", "triplet_margin_loss",
    "cosine_embedding_loss", "soft_margin_loss", "isfinite",
)  # fmt: skip
_HEARD = COMPUTING.union(LOOKING, _MAKING, _DECIDING, _FURTHER)

# A framework's name of a function -> the common name, in traces only; `_COMMON` applies before.
_ALSO = {
    "__rmatmul__": "rmatmul",
    "__imul__": "mul",
    "__isub__": "sub",
    "__itruediv__": "div",
    "__idiv__": "div",
    "__rpow__": "rpow",
    "__mod__": "remainder",
    "mod": "remainder",
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
    "__invert__": "logical_not",
    "__and__": "logical_and",
    "__or__": "logical_or",
    "__getitem__": "getitem",
    "__setitem__": "setitem",
    "__abs__": "abs",
    "equal_all": "eq",
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_than": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_than": "gt",
    "greater_equal": "ge",
    "bitwise_not": "logical_not",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "t": "transpose",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "type_as": "cast",
    "astype": "cast",
    "type": "cast",
    "float": "cast",
    "half": "cast",
    "bfloat16": "cast",
    "double": "cast",
    "long": "cast",
    "int": "cast",
    "bool": "cast",
    "absolute": "abs",
    "vsplit": "split",
    "hsplit": "split",
    "tensor_split": "split",
    "split_with_sizes": "split",
    "hstack": "cat",
    "vstack": "cat",
    "ravel": "flatten",
    "new_zeros": "zeros",
    "new_ones": "ones",
    "new_full": "full",
    "to_tensor": "tensor",
    "as_tensor": "tensor",
    "multiply": "mul",
    "take_along_dim": "take_along_axis",
    "amax": "max",
    "amin": "min",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "arctan2": "atan2",
    "float_power": "pow",
    "log_sigmoid": "logsigmoid",
    "mv": "matmul",
    "inner": "matmul",
}

# Parameter names of the functions of torch that are written in C, by common name of the function.
_PARAMETERS = {
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "cumprod", "glu"), ("input", "dim")),
    **dict.fromkeys(("mean", "sum", "prod", "var", "std", "logsumexp", "max", "min", "argmax", "argmin", "squeeze",
                     "unsqueeze", "unbind", "norm"), ("input", "dim", "keepdim")),
    **dict.fromkeys(("add", "sub", "mul", "div", "matmul", "pow", "eq", "ne", "lt", "le", "gt", "ge", "maximum",
                     "minimum", "rsub", "rdiv", "rmatmul", "rpow", "remainder"), ("input", "other")),
    **dict.fromkeys(("sort", "argsort"), ("input", "dim", "descending")),
    "topk": ("input", "k", "dim", "largest", "sorted"),
    "transpose": ("input", "dim0", "dim1"),
    "cat": ("tensors", "dim"),
    "stack": ("tensors", "dim"),
    "masked_fill": ("input", "mask", "value"),
    "where": ("condition", "input", "other"),
    "clamp": ("input", "min", "max"),
    "flatten": ("input", "start_dim", "end_dim"),
    "split": ("input", "split_size", "dim"),
    "chunk": ("input", "chunks", "dim"),
    "narrow": ("input", "dim", "start", "length"),
    "select": ("input", "dim", "index"),
    "triu": ("input", "diagonal"),
    "tril": ("input", "diagonal"),
    "gelu": ("input",),
    "linear": ("input", "weight", "bias"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    "einsum": ("equation", "operands"),
}  # fmt: skip


def row_axis(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the axis along which a function ranks its input; `None` if it ranks all elements.

    Args:
        name: the function's common name.
        arguments: its plain arguments by parameter name, as a trace has them: of any type.
    """
    axis = arguments.get("dim", arguments.get("axis"))
    return -1 if axis is None and name in ("topk", "sort", "argsort") else axis


def heard_name(name: str) -> str | None:
    """Return the common name of a function or operator; `None` if traces leave the function out."""
    bare = name if name.startswith("__") else name.rstrip("_")
    bare = bare.removeprefix("linalg_").removeprefix("special_")
    bare = _COMMON.get(bare) or _ALSO.get(bare) or _TRANSPOSED.get(bare, bare)
    return bare if bare in _HEARD or bare in ("rmatmul", "rpow") else None


def parameters_of(name: str) -> tuple[str, ...]:
    """Return the names of a function's positional parameters, in order; empty if they are unknown.

    Args:
        name: the function's common name.
    """
    return _PARAMETERS.get(name, ())
