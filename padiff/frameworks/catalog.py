"""Names of both frameworks: functions and operators, layers, optimizers, losses, and their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from padiff.frameworks.losses import LOSS_SETTINGS, ROLES, WEIGHTS
from padiff.frameworks.settings import LAYER_SETTINGS
from padiff.records.traces import (
    FIRST_MOMENT,
    GRADIENT_AVERAGE,
    INFINITY_NORM,
    MAX_SECOND_MOMENT,
    MOMENTUM,
    PREVIOUS_GRADIENT,
    SECOND_MOMENT,
    SQUARE_AVERAGE,
    SQUARE_SUM,
    STEP_SIZE,
    UPDATE_AVERAGE,
)
from padiff.system.code import ForeignCodeError, Vocabulary, literal


@dataclass(frozen=True)
class OptimizerClass:
    """A class of a framework.

    Attributes:
        name: its name in the framework's module of optimizers.
        tensors: the framework's name of a tensor of its state -> the common name; `None` if states can't be converted.
        settings: the framework's name of a setting -> the common name. torch's are read from the groups.
        powers: tensors of its state that hold a power: name, the base (a setting's name), and the initial exponent.
        epsilon: where it adds epsilon, if the frameworks differ in this rule, as a phrase.
        inside: True if that is the place that the rule's form ``inside`` stands for.
    """

    name: str
    tensors: Mapping[str, str] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    powers: tuple[tuple[str, str, int], ...] = ()
    epsilon: str = ""
    inside: bool = False


@dataclass(frozen=True)
class Optimizer:
    """An update rule that has the same meaning in both frameworks.

    Attributes:
        rule: the common name.
        classes: the classes that follow the rule, by framework.
        counts: True if the update depends on the number of steps.
    """

    rule: str
    classes: Mapping[str, tuple[OptimizerClass, ...]]
    counts: bool = False


def _row(rule: str, torch: OptimizerClass | None, *paddle: OptimizerClass, counts: bool = False) -> Optimizer:
    return Optimizer(rule, {"torch": () if torch is None else (torch,), "paddle": paddle}, counts)


_Class = OptimizerClass
_TORCH_MOMENTS = {"exp_avg": FIRST_MOMENT, "exp_avg_sq": SECOND_MOMENT}
_TORCH_ADAM = {**_TORCH_MOMENTS, "max_exp_avg_sq": MAX_SECOND_MOMENT}
_TORCH_ADAMAX = {"exp_avg": FIRST_MOMENT, "exp_inf": INFINITY_NORM}
_TORCH_ADADELTA = {"square_avg": SQUARE_AVERAGE, "acc_delta": UPDATE_AVERAGE}
_TORCH_RMSPROP = {"square_avg": SQUARE_AVERAGE, "momentum_buffer": MOMENTUM, "grad_avg": GRADIENT_AVERAGE}
_MOMENTS = {"moment1": FIRST_MOMENT, "moment2": SECOND_MOMENT}
_ADAM = {**_MOMENTS, "moment2_max": MAX_SECOND_MOMENT}
_ADAMAX = {"moment": FIRST_MOMENT, "inf_norm": INFINITY_NORM}
_ADADELTA = {"_avg_squared_grad": SQUARE_AVERAGE, "_avg_squared_update": UPDATE_AVERAGE}
_RMSPROP = {"mean_square": SQUARE_AVERAGE, "momentum": MOMENTUM, "mean_grad": GRADIENT_AVERAGE}
_RPROP = {"prevs": PREVIOUS_GRADIENT, "learning_rates": STEP_SIZE}

# paddle's settings, and its accumulators that hold powers.
_BETAS = {"beta1": "beta1", "beta2": "beta2", "epsilon": "eps"}
_BETAS_AND_DECAY = {**_BETAS, "momentum_decay": "momentum_decay"}
_OF_MOMENTUM = {"momentum": "momentum", "use_nesterov": "nesterov", "rescale_grad": "rescale_grad"}
_OF_ADAGRAD = {"epsilon": "eps", "initial_accumulator_value": "initial_accumulator_value"}
_OF_ADADELTA = {"epsilon": "eps", "rho": "rho"}
_OF_RMSPROP = {"rho": "alpha", "epsilon": "eps", "momentum": "momentum", "centered": "centered"}
_POWERS = (("beta1_pow_acc", "beta1", 1), ("beta2_pow_acc", "beta2", 1))
_POWERS_AHEAD = (("beta1_pow", "beta1", 0), ("beta2_pow", "beta2", 0))

# fmt: off
CATALOG = (
    _row("SGD", _Class("SGD", {"momentum_buffer": MOMENTUM}),
         _Class("SGD", {}), _Class("Momentum", {"velocity": MOMENTUM}, _OF_MOMENTUM)),
    _row("Adam", _Class("Adam", _TORCH_ADAM), _Class("Adam", _ADAM, _BETAS, _POWERS), counts=True),
    _row("AdamW", _Class("AdamW", _TORCH_ADAM), _Class("AdamW", _ADAM, _BETAS, _POWERS), counts=True),
    _row("Adamax", _Class("Adamax", _TORCH_ADAMAX, epsilon="to the gradient"),
         _Class("Adamax", _ADAMAX, _BETAS, _POWERS[:1], "to the norm before", inside=True), counts=True),
    _row("NAdam", _Class("NAdam", _TORCH_MOMENTS),
         _Class("NAdam", _MOMENTS, _BETAS_AND_DECAY, _POWERS_AHEAD[1:]), counts=True),
    _row("RAdam", _Class("RAdam", _TORCH_MOMENTS), _Class("RAdam", _MOMENTS, _BETAS, _POWERS_AHEAD), counts=True),
    _row("Lamb", None, _Class("Lamb", _MOMENTS, _BETAS, _POWERS), counts=True),
    _row("Adagrad", _Class("Adagrad", {"sum": SQUARE_SUM}), _Class("Adagrad", {"moment": SQUARE_SUM}, _OF_ADAGRAD)),
    _row("Adadelta", _Class("Adadelta", _TORCH_ADADELTA), _Class("Adadelta", _ADADELTA, _OF_ADADELTA)),
    _row("RMSProp", _Class("RMSprop", _TORCH_RMSPROP, epsilon="outside of the root"),
         _Class("RMSProp", _RMSPROP, _OF_RMSPROP, epsilon="inside of the root", inside=True)),
    _row("Rprop", _Class("Rprop", {"prev": PREVIOUS_GRADIENT, "step_size": STEP_SIZE}), _Class("Rprop", _RPROP)),
    _row("LBFGS", _Class("LBFGS"), _Class("LBFGS")),
    _row("Adafactor", _Class("Adafactor")),
)
# fmt: on


def classes(framework: str) -> dict[str, tuple[str, OptimizerClass]]:
    """Return a framework's classes by name, each with the common name of its rule."""
    return {known.name: (row.rule, known) for row in CATALOG for known in row.classes.get(framework, ())}


def epsilon_of(framework: str, rule: str) -> OptimizerClass | None:
    """Return the class of a rule in which the frameworks add epsilon in different places; `None` in other rules."""
    return next((known for name, known in classes(framework).values() if name == rule and known.epsilon), None)


@dataclass(frozen=True)
class ArgumentNames:
    """The names by which one framework's code sets things.

    Attributes:
        optimizers, layers: the modules that hold optimizers and layers.
        rate: an optimizer's argument for the learning rate.
        tensor: the function that makes a tensor of numbers.
        values: common name of an optimizer's setting -> the argument, and the common names of the argument's items.
        clips: kind of clipping -> a call or an argument that clips; ``{}`` stands for the limit.
        rules: common name of an update rule -> the class, if its name differs.
        with_momentum: the class for SGD with momentum, if it has a class of its own.
        arguments: common name of a layer's setting -> the argument, if its name differs.
        converted: common name of a layer's setting -> a function that converts the common value, which is torch's, to
            the argument. Momentum is that of a normalization layer.
        losses: common name of a loss function -> its name, and arguments that select this loss.
        loss_arguments: common name of a loss's setting -> the argument, if its name differs.
        parameters: an optimizer's argument for its parameters; empty if they are the first positional argument.
    """

    optimizers: str
    layers: str
    rate: str
    tensor: str
    values: Mapping[str, tuple[str, tuple[str, ...]]]
    clips: Mapping[str, str]
    rules: Mapping[str, str] = field(default_factory=dict)
    with_momentum: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    losses: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    loss_arguments: Mapping[str, str] = field(default_factory=dict)
    parameters: str = ""


def _alone(names: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {name: (name, (name,)) for name in names.split()}


def _as(argument: str, *names: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    return dict.fromkeys(names, (argument, names))


_SHARED = _alone("momentum momentum_decay initial_accumulator_value rho centered amsgrad")
_LBFGS = _alone("max_iter max_eval tolerance_grad tolerance_change history_size line_search_fn")
_TORCH = ArgumentNames(
    optimizers="torch.optim",
    layers="torch.nn",
    rate="lr",
    tensor="torch.tensor",
    values={
        **_SHARED,
        **_LBFGS,
        **_alone("eps dampening nesterov maximize alpha lr_decay"),
        **_as("betas", "beta1", "beta2"),
        **_as("etas", "eta_minus", "eta_plus"),
        **_as("step_sizes", "step_min", "step_max"),
        **_as("weight_decay", "decay.coupled"),
        **_as("weight_decay", "decay.decoupled"),
    },
    clips={
        "global_norm": "torch.nn.utils.clip_grad_norm_(model.parameters(), {})",
        "value": "torch.nn.utils.clip_grad_value_(model.parameters(), {})",
    },
    rules={rule: name for name, (rule, _) in classes("torch").items() if name != rule},
    arguments={"slope": "negative_slope"},
)
_PADDLE = ArgumentNames(
    optimizers="paddle.optimizer",
    layers="paddle.nn",
    rate="learning_rate",
    tensor="paddle.to_tensor",
    values={
        **_SHARED,
        **_LBFGS,
        **_alone("beta1 beta2 rescale_grad"),
        **_as("epsilon", "eps"),
        **_as("use_nesterov", "nesterov"),
        **_as("rho", "alpha"),
        **_alone("rho"),
        **_as("etas", "eta_minus", "eta_plus"),
        **_as("learning_rate_range", "step_min", "step_max"),
        **_as("weight_decay", "decay.coupled"),
        **_as("weight_decay", "decay.decoupled"),
        **_as("weight_decay", "decay.l1"),
    },
    clips={
        "global_norm": "grad_clip=paddle.nn.ClipGradByGlobalNorm({})",
        "tensor_norm": "grad_clip=paddle.nn.ClipGradByNorm({})",
        "value": "grad_clip=paddle.nn.ClipGradByValue({})",
    },
    with_momentum="Momentum",
    arguments={
        "batch_first": "time_major",
        "eps": "epsilon",
        "slope": "negative_slope",
        "count_include_pad": "exclusive",
        "min_val": "min",
        "max_val": "max",
        "lambd": "threshold",
        "norm_first": "normalize_before",
        "nonlinearity": "activation",
    },
    converted={
        "batch_first": lambda first: not first,
        # paddle's momentum weights the old running statistics, torch's weights the new batch.
        "momentum": lambda value: round(1.0 - value, 12),
        "approximate": lambda value: value == "tanh",
        "count_include_pad": lambda value: not value,
    },
    losses={
        "huber_loss": ("smooth_l1_loss", ""),
        "smooth_l1_loss": ("smooth_l1_loss", "is_huber=False"),
        "multilabel_margin_loss": ("multi_label_margin_loss", ""),
        "multilabel_soft_margin_loss": ("multi_label_soft_margin_loss", ""),
    },
    loss_arguments={"beta": "delta", "eps": "epsilon"},
    parameters="parameters",
)
SPELLINGS = {"torch": _TORCH, "paddle": _PADDLE}


def number_text(value: Any) -> str:
    """Return a value as a literal of code, rounded to 7 digits if float32 can't tell the difference."""
    if not isinstance(value, float) or not math.isfinite(value):
        return literal(value)
    short = float(f"{value:.7g}")
    return literal(short if abs(short - value) <= 1e-7 * abs(value) else value)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Classes of layers, by framework.
LAYERS = {
    "torch": _words(
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d "
        "AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d BatchNorm3d Bilinear "
        "CELU ChannelShuffle CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d "
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d CosineSimilarity CrossMapLRN2d "
        "Dropout Dropout1d Dropout2d Dropout3d ELU Embedding EmbeddingBag FeatureAlphaDropout Flatten Fold "
        "FractionalMaxPool2d FractionalMaxPool3d GELU GLU GRU GRUCell GroupNorm Hardshrink Hardsigmoid Hardswish "
        "Hardtanh Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d LPPool1d LPPool2d LPPool3d LSTM LSTMCell "
        "LayerNorm LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d "
        "LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d "
        "LazyInstanceNorm3d LazyLinear LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MaxPool1d MaxPool2d "
        "MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish MultiheadAttention PReLU PairwiseDistance PixelShuffle "
        "PixelUnshuffle RMSNorm RNN RNNCell RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d ReflectionPad3d "
        "ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus "
        "Softshrink Softsign SyncBatchNorm Tanh Tanhshrink Threshold Transformer TransformerDecoder "
        "TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer Unflatten Unfold Upsample "
        "UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d"
    ),
    "paddle": _words(
        "AdaptiveAvgPool1D AdaptiveAvgPool1d AdaptiveAvgPool2D AdaptiveAvgPool2d AdaptiveAvgPool3D "
        "AdaptiveAvgPool3d AdaptiveMaxPool1D AdaptiveMaxPool1d AdaptiveMaxPool2D AdaptiveMaxPool2d "
        "AdaptiveMaxPool3D AdaptiveMaxPool3d AlphaDropout AvgPool1D AvgPool2D AvgPool3D BatchNorm BatchNorm1D "
        "BatchNorm2D BatchNorm3D BiRNN Bilinear CELU ChannelShuffle CircularPad1D CircularPad1d CircularPad2D "
        "CircularPad2d CircularPad3D CircularPad3d ConstantPad1D ConstantPad1d ConstantPad2D ConstantPad2d "
        "ConstantPad3D ConstantPad3d Conv1D Conv1DTranspose Conv1d Conv2D Conv2DTranspose Conv2d Conv3D "
        "Conv3DTranspose Conv3d CosineSimilarity Dropout Dropout2D Dropout3D ELU Embedding FeatureAlphaDropout "
        "Flatten Fold FractionalMaxPool2D FractionalMaxPool3D GELU GLU GRU GRUCell GroupNorm Hardshrink Hardsigmoid "
        "Hardswish Hardtanh Identity InstanceNorm1D InstanceNorm2D InstanceNorm3D LPPool1D LPPool1d LPPool2D "
        "LPPool2d LSTM LSTMCell LayerNorm LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MaxPool1D "
        "MaxPool2D MaxPool3D MaxUnPool1D MaxUnPool2D MaxUnPool3D MaxUnpool1d MaxUnpool2d MaxUnpool3d Maxout Mish "
        "MultiHeadAttention PReLU Pad1D Pad2D Pad3D PairwiseDistance PixelShuffle PixelUnshuffle RNN RReLU ReLU "
        "ReLU6 ReflectionPad1D ReflectionPad1d ReflectionPad2D ReflectionPad2d ReflectionPad3D ReflectionPad3d "
        "ReplicationPad1D ReplicationPad1d ReplicationPad2D ReplicationPad2d ReplicationPad3D ReplicationPad3d SELU "
        "SiLU Sigmoid Silu SimpleRNN SimpleRNNCell Softmax Softmax2D Softplus Softshrink Softsign SpectralNorm "
        "Swish SyncBatchNorm Tanh Tanhshrink ThresholdedReLU Transformer TransformerDecoder TransformerDecoderLayer "
        "TransformerEncoder TransformerEncoderLayer Unflatten Unfold Upsample UpsamplingBilinear2D "
        "UpsamplingBilinear2d UpsamplingNearest2D UpsamplingNearest2d ZeroPad1D ZeroPad1d ZeroPad2D ZeroPad2d "
        "ZeroPad3D ZeroPad3d"
    ),
}
#: Classes of optimizers, by framework.
OPTIMIZERS = {
    "torch": _words("ASGD Muon SparseAdam") | classes("torch").keys(),
    "paddle": _words("ASGD") | classes("paddle").keys(),
}
#: Arguments of the functions that a script calls.
ARGUMENTS = _words(
    "act align_corners align_mode alpha antialias approximate attn_mask axes axis batch1 batch2 beta bias "
    "bias_after_scale ceil_mode chunks condition copy correction count_include_pad data_format decimals delta "
    "descending destination diagonal dilation dilations dim dim0 dim1 dimension dims divisor_override dropout_p "
    "dtype enable_gqa end end_dim eps epsilon equation exclusive fill_value grid groups ignore_index index "
    "indexing input input1 input2 is_causal is_huber k keepdim keepdims kernel_size kernel_sizes key label "
    "label_smoothing lambd largest length log_target logit m mask mat1 mat2 max max_norm max_val min min_val "
    "mode momentum n negative_slope non_blocking norm_type normalized_shape num num_classes num_columns "
    "num_groups num_or_sections num_rows offset operands ord other out_dtype output_padding output_size "
    "output_sizes p pad pad_from_left_axis padding padding_idx padding_mode paddings perm pos_weight query "
    "recompute_scale_factor reduce reduction repeat_times repeats return_indices return_mask rounding_mode "
    "running_mean running_var scale scale_factor scale_grad_by_freq shape shape_or_dtype shifts size "
    "size_average sizes slope soft_label sorted source sparse sparse_grad split_size split_size_or_sections "
    "split_sizes stable start start_axis start_dim step steps stop stop_axis stride strides target tensor "
    "tensors threshold training transpose_x transpose_y unbiased upscale_factor use_global_stats "
    "use_input_stats use_softmax value vec1 vec2 weight x x1 x2 y"
)


def is_loss(function: str, settings: object = ()) -> bool:
    """Return True if a loss function, and all names of its settings, are known."""
    return function in ROLES and set(settings) <= {*LOSS_SETTINGS, *WEIGHTS, "function"}  # type: ignore[call-overload]


def _vocabulary(framework: str, spelling: ArgumentNames) -> Vocabulary:
    """Return the names that a line which fixes a setting may contain, for one framework."""
    functional = f"{spelling.layers}.functional"
    losses = {*ROLES, *(name for name, _ in spelling.losses.values())}
    arguments = {
        spelling.rate,
        *(argument for argument, _ in spelling.values.values()),
        *LAYER_SETTINGS,
        *spelling.arguments.values(),
        *LOSS_SETTINGS,
        *spelling.loss_arguments.values(),
        *WEIGHTS,
        "is_huber",
        "grad_clip",
        *_WITHOUT[framework],
        *([spelling.parameters] if spelling.parameters else []),
    }
    chains = {
        *(f"{spelling.optimizers}.{name}" for name in OPTIMIZERS[framework]),
        *(f"{spelling.layers}.{name}" for name in LAYERS[framework]),
        *(f"{functional}.{name}" for name in losses),
        *_CLIPS[framework],
        spelling.tensor,
    }
    return Vocabulary(
        variables=frozenset({"model", "grad_clip", "labels", "attr", "weight_attr", "bias_attr"}),
        functions=frozenset({"float"}),
        chains=frozenset(chains),
        members=frozenset({"parameters", "train", "eval", "sum", "numel"}),
        keywords=frozenset(arguments),
    )


# Arguments that create a layer without parameters, and an optimizer with weights in float32.
_WITHOUT = {
    "torch": ("affine", "elementwise_affine", "bias"),
    "paddle": ("weight_attr", "bias_attr", "multi_precision", "regularizer"),
}
_CLIPS = {
    "torch": ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"),
    "paddle": (
        "paddle.nn.ClipGradByGlobalNorm", "paddle.nn.ClipGradByNorm", "paddle.nn.ClipGradByValue",
        "paddle.regularizer.L1Decay", "paddle.regularizer.L2Decay", "paddle.ParamAttr",
    ),
}  # fmt: skip
#: Names that lines which fix a setting may contain, by framework.
FIXES = {framework: _vocabulary(framework, spelling) for framework, spelling in SPELLINGS.items()}


def checked_fix(framework: str, line: str) -> str:
    """Return the line of code that fixes a setting, or an empty text if a name in it is outside the catalog."""
    vocabulary = FIXES.get(framework)
    if vocabulary is None:
        return ""
    try:
        vocabulary.check_code(line)
    except ForeignCodeError:
        return ""
    return line


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
#: Functions that give the values of their input, in their order, in another shape.
RESHAPING = frozenset({"unsqueeze", "squeeze", "reshape", "view", "flatten"})
#: The function by which a loop asks for gradients: ``torch.autograd.grad``, ``paddle.grad``.
GRAD = "grad"
#: Name, in traces, of the loop's pseudo-call on the gradients that an optimizer takes.
CONSUMED = "consumed"
#: Functions that keep the values of their input.
KEEPING = frozenset({"cast", "to", "contiguous", "clone", "detach"})
_MAKING = (
    "zeros", "ones", "full", "arange", "linspace", "eye", "zeros_like", "ones_like", "full_like", "tensor", "triu",
    "tril", "outer", "one_hot",
)  # fmt: skip
_DECIDING = (
    "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and",
    "bitwise_or", "isnan", "isinf", "sign", "topk", "sort", "argmax", "argmin", "argsort", "kthvalue", "quantile",
    "searchsorted", "trunc", "floor_divide", "heaviside", "nonzero", "multinomial", "isin",
    "gumbel_softmax", "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine",
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
    "cosine_embedding_loss", "soft_margin_loss", "isfinite", "max_unpool1d", "max_unpool2d", "max_unpool3d",
    "fractional_max_pool2d", "fractional_max_pool3d", "gumbel_softmax", "scatter_reduce", "bincount", "logcumsumexp",
    "trace", "kron", "index_sample", "gather_nd", "scatter_nd_add", "trunc", "fmod", "xlogy", "cross", "quantile",
    "tensordot", "lgamma", "vector_norm", "matrix_norm", "diag", "diag_embed", "mv", "inner", "vdot", "add_n", "cummax",
    "cummin", "nansum", "nanmean", "pdist", "square_error_cost", "log_loss", "huber_loss", "gaussian_nll_loss",
    "poisson_nll_loss", "sigmoid_focal_loss", "hinge_embedding_loss", "multi_margin_loss", "dice_loss", GRAD,
    "cholesky", "cholesky_solve", "triangular_solve", "solve", "inv", "det", "logdet",
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
    "set_value": "copy",
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
    "msort": "sort",
    "nanmedian": "median",
    "nanquantile": "quantile",
    "fix": "trunc",
    "__floordiv__": "floor_divide",
    "arccos": "acos",
    "arcsin": "asin",
    "arctan": "atan",
    "arctan2": "atan2",
    "float_power": "pow",
    "log_sigmoid": "logsigmoid",
    "mv": "matmul",
    "inner": "matmul",
    "solve_triangular": "triangular_solve",
    "inverse": "inv",
}

# Parameter names of the functions of torch that are written in C, by common name of the function.
_PARAMETERS = {
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "cumprod", "glu"), ("input", "dim")),
    **dict.fromkeys(("mean", "sum", "prod", "var", "std", "logsumexp", "max", "min", "argmax", "argmin", "median",
                     "squeeze", "unsqueeze", "unbind", "norm"), ("input", "dim", "keepdim")),
    **dict.fromkeys(("add", "sub", "mul", "div", "matmul", "pow", "eq", "ne", "lt", "le", "gt", "ge", "maximum",
                     "minimum", "rsub", "rdiv", "rmatmul", "rpow", "remainder"), ("input", "other")),
    **dict.fromkeys(("sort", "argsort"), ("input", "dim", "descending")),
    "bucketize": ("input", "boundaries"),
    "kthvalue": ("input", "k", "dim", "keepdim"),
    "quantile": ("input", "q", "dim", "keepdim"),
    "searchsorted": ("sorted_sequence", "input"),
    "topk": ("input", "k", "dim", "largest", "sorted"),
    "multinomial": ("input", "num_samples", "replacement"),
    "fake_quantize_per_tensor_affine": ("input", "scale", "zero_point", "quant_min", "quant_max"),
    "fake_quantize_per_channel_affine": ("input", "scale", "zero_point", "axis", "quant_min", "quant_max"),
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
    GRAD: ("outputs", "inputs"),
}  # fmt: skip


# Functions that rank along the last axis if they are given none.
_ALONG_THE_LAST = frozenset({"topk", "sort", "argsort", "kthvalue", "multinomial", "gumbel_softmax"})


def row_axis(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return the axis along which a function ranks its input; `None` if it ranks all elements.

    Args:
        name: the function's common name.
        arguments: its plain arguments by parameter name, as a trace has them: of any type.
    """
    axis = arguments.get("dim", arguments.get("axis"))
    return -1 if axis is None and name in _ALONG_THE_LAST else axis


def is_descending(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return True if a function ranks the largest score of a row first; see `row_axis`."""
    if name == "topk":
        return bool(arguments.get("largest", True))
    if name in ("sort", "argsort"):
        return bool(arguments.get("descending"))
    return name in ("argmax", "max", "multinomial", "gumbel_softmax")


def first_rank(name: str, arguments: Mapping[str, Any], size: int) -> int | None:
    """Return the rank, from the least score, of the place that a function takes from the middle of a row.

    `None` for functions that take the first places.

    Args:
        name, arguments: see `row_axis`.
        size: number of places.
    """
    rank: Any = None
    if name == "kthvalue":
        rank = arguments.get("k")
        rank = rank - 1 if isinstance(rank, int) else None
    elif name == "median":
        rank = (size - 1) // 2
    elif name == "quantile":
        q = arguments.get("q")
        rank = math.floor(q * (size - 1)) if isinstance(q, (int, float)) and 0 <= q <= 1 else None
    return rank if rank is not None and 0 <= rank < size else None


def pooled_axes(name: str, arguments: Mapping[str, Any]) -> int:
    """Return the number of axes, the last ones, over which a function pools, if it returns the places; else 0."""
    if not name.endswith("d") or "max_pool" not in name:
        return 0
    return int(name[-2]) if arguments.get("return_indices") or arguments.get("return_mask") else 0


def heard_name(name: str) -> str | None:
    """Return the common name of a function or operator; `None` if traces leave the function out."""
    bare = name if name.startswith("__") else name.rstrip("_")
    bare = bare.removeprefix("linalg_").removeprefix("special_").removesuffix("_with_indices")
    bare = _COMMON.get(bare) or _ALSO.get(bare) or _TRANSPOSED.get(bare, bare)
    return bare if bare in _HEARD or bare in ("rmatmul", "rpow") else None


def parameters_of(name: str) -> tuple[str, ...]:
    """Return the names of a function's positional parameters, in order; empty if they are unknown.

    Args:
        name: the function's common name.
    """
    return _PARAMETERS.get(name, ())
