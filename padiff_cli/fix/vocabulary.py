"""Names and values that may become code of the candidate: those of the catalog, in the candidate's framework.

Lines of code from a run folder are parsed here and nowhere else becomes code: what is not in the catalog is refused.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping

from padiff.frameworks.catalog import (
    ARGUMENTS,
    FIXES,
    LAYERS,
    OPTIMIZERS,
    SPELLINGS,
    heard_name,
    is_loss,
    parameters_of,
)
from padiff.frameworks.losses import ROLES
from padiff.model.equivalents import common_kind
from padiff.system.code import literal


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Texts that are options of functions.
_OPTIONS = _words(
    "mean sum none batchmean tanh erf bilinear nearest bicubic linear trilinear area zeros reflect replicate circular "
    "constant border max min floor trunc same valid relu gelu silu NCHW NHWC NCL NLC norm value cosine "
    "cosine_with_restarts polynomial constant_with_warmup inverse_sqrt"
)
_SCHEDULERS = {
    "torch": _words(
        "StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR CyclicLR OneCycleLR "
        "CosineAnnealingWarmRestarts ReduceLROnPlateau"
    ),
    "paddle": _words(
        "StepDecay MultiStepDecay NaturalExpDecay ExponentialDecay InverseTimeDecay PolynomialDecay PiecewiseDecay "
        "CosineAnnealingDecay LinearWarmup NoamDecay OneCycleLR CyclicLR LambdaDecay "
        "ReduceOnPlateau LinearLR"
    ),
}
_SCHEDULES = {"ReduceOnPlateau": "ReduceLROnPlateau", "LinearLR": "Linear"}
#: Functions that make a tensor of an array.
CONVERTING = _words("to_tensor from_numpy tensor as_tensor asarray")
_CLIPS = _words("clip_grad_norm_ clip_grad_value_ ClipGradByGlobalNorm ClipGradByNorm ClipGradByValue DataLoader")
# Common names of arguments; other arguments have one name in both frameworks.
_COMMON = {
    **{name: common for common, name in SPELLINGS["paddle"].arguments.items()},
    "axis": "dim",
    "start_axis": "start_dim",
    "stop_axis": "end_dim",
    "learning_rate": "lr",
    "gamma_": "gamma",
    "bias_attr": "bias",
    "weight_attr": "elementwise_affine",
    "clip_norm": "max_norm",
    "keepdims": "keepdim",
    "use_nesterov": "nesterov",
    "eta_min_": "eta_min",
    "decay_steps": "total_iters",
    "normalize_before": "norm_first",
    "persistable": "persistent",
}
_PADDLE = {
    "dim": "axis",
    "start_dim": "start_axis",
    "end_dim": "stop_axis",
    "lr": "learning_rate",
    "bias": "bias_attr",
    "elementwise_affine": "weight_attr",
    "max_norm": "clip_norm",
    "nesterov": "use_nesterov",
    "norm_first": "normalize_before",
    **SPELLINGS["paddle"].arguments,
}
_FURTHER = _words(
    "lr betas beta1 beta2 eps epsilon weight_decay momentum nesterov use_nesterov dampening amsgrad centered rho "
    "initial_accumulator_value learning_rate grad_clip step_size gamma milestones T_max eta_min total_iters power "
    "last_epoch factor patience warmup_steps start_lr end_lr decay_steps values boundaries shuffle batch_size "
    "drop_last bias bias_attr affine elementwise_affine weight_attr p dropout max_norm clip_norm norm_type clip_value "
    "slope negative_slope inplace approximate alpha beta delta margin label_smoothing ignore_index reduction "
    "align_corners mode scale_factor size track_running_stats set_to_none activation norm_first normalize_before"
)
#: Names of arguments that may be written.
KEYWORDS = ARGUMENTS | _FURTHER | FIXES["torch"].keywords | FIXES["paddle"].keywords
_FUNCTIONAL = _words(
    "softmax log_softmax relu relu6 leaky_relu elu selu celu gelu silu swish mish hardswish hardsigmoid hardtanh "
    "softplus prelu glu linear bilinear embedding conv1d conv2d conv3d layer_norm batch_norm group_norm instance_norm "
    "normalize rms_norm dropout dropout2d dropout3d alpha_dropout interpolate pad max_pool1d max_pool2d max_pool3d "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d "
    "grid_sample pixel_shuffle unfold fold scaled_dot_product_attention"
)
_RENAMED = {"paddle": {"cat": "concat", "clamp": "clip", "swish": "silu", "amax": "max", "amin": "min",
                       **dict.fromkeys(CONVERTING, "to_tensor")},
            "torch": {"concat": "cat", "clip": "clamp", "swish": "silu", "to_tensor": "as_tensor"}}  # fmt: skip
# Functions of one tensor whose other arguments have defaults.
UNARY = _words(
    "normalize relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus sigmoid tanh "
    "exp log log1p sqrt rsqrt abs square sin cos sign log_sigmoid softsign"
)


def common_argument(name: str, call: str = "") -> str:
    """Return the name of an argument that both frameworks share; ``rho`` of paddle's RMSProp is torch's ``alpha``."""
    return "alpha" if (name, call) == ("rho", "RMSProp") else _COMMON.get(name, name)


def argument_name(framework: str, common: str, name: str) -> str:
    """Return the name of an argument in a framework.

    Args:
        framework: the framework.
        common: the common name.
        name: the name in the code that it is taken from.
    """
    if framework == "paddle":
        return _PADDLE.get(common, name)
    return SPELLINGS["torch"].arguments.get(common, common if common in KEYWORDS else name)


# The arguments that layers take by place, in both frameworks, by their common names.
_PLACES = {
    name: arguments.split()
    for names, arguments in {
        "leakyrelu": "negative_slope",
        "elu celu": "alpha",
        "softplus": "beta",
        "softmax logsoftmax glu": "dim",
        "dropout dropout1d dropout2d dropout3d alphadropout": "p",
        "groupnorm": "num_groups num_channels eps",
        "layernorm rmsnorm": "normalized_shape eps",
        "conv1d conv2d conv3d": "in_channels out_channels kernel_size stride padding dilation groups",
        "avgpool1d avgpool2d avgpool3d maxpool1d maxpool2d maxpool3d": "kernel_size stride padding",
        "embedding": "num_embeddings embedding_dim padding_idx",
        "lstm gru": "input_size hidden_size num_layers",
        "upsample": "size scale_factor mode",
    }.items()
    for name in names.split()
}


def argument_place(call: str, argument: str) -> int | None:
    """Return the place at which a layer or function takes an argument; `None` if it is not known.

    Args:
        call: the name of the layer or function.
        argument: the argument's common name.
    """
    names = _PLACES.get(call.lower(), []) if kind_of(call) == "layer" else []
    if kind_of(call) == "function":
        layer = _PLACES.get(call.replace("_", ""), [])
        # A function takes the only setting of a layer of its name behind the tensor.
        names = [*parameters_of(common_call(call))] or (["x", *layer] if len(layer) == 1 else [])
    names = [common_argument(each) for each in names]
    return names.index(argument) if argument in names else None


def _plain_loss(name: str) -> str:
    plain = name.replace("_", "").lower().removesuffix("loss")
    return {"bcewithlogits": "binarycrossentropywithlogits", "bce": "binarycrossentropy"}.get(plain, plain)


# Functions of losses whose class has another name than theirs in capitals: `huber_loss` and `HuberLoss`.
_LOSS_CLASSES = {
    "mse_loss": "MSELoss", "cross_entropy": "CrossEntropyLoss", "nll_loss": "NLLLoss", "kl_div": "KLDivLoss",
    "ctc_loss": "CTCLoss", "binary_cross_entropy": "BCELoss", "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    **{name: name.title().replace("_", "") for name in (
        "l1_loss", "smooth_l1_loss", "huber_loss", "margin_ranking_loss", "cosine_embedding_loss",
        "hinge_embedding_loss", "triplet_margin_loss", "soft_margin_loss", "multi_label_soft_margin_loss",
    )},
}  # fmt: skip
_LOSS_FUNCTIONS = {name: function for function, name in _LOSS_CLASSES.items()}


# Layers that take the name of their activation.
TAKING_ACTIVATION = _words("Transformer TransformerEncoderLayer TransformerDecoderLayer")


def loss_like(name: str, other: str) -> str:
    """Return a loss as a class where another one is a class, and as a function where that one is a function."""
    return (_LOSS_CLASSES if other.endswith("Loss") else _LOSS_FUNCTIONS).get(name, name)


_LOSSES = frozenset(map(_plain_loss, ROLES))


def is_layer(name: str) -> bool:
    """Return True if a name is a layer's class of a framework."""
    return any(name in names for names in LAYERS.values())


def kind_of(name: str) -> str:
    """Return the family of a function or class of the catalog: ``layer``, ``optimizer``, ``schedule``, ``loss``,
    ``clip``, ``function``; empty for any other name.
    """
    if name in CONVERTING:
        return "convert"
    if name in _CLIPS:
        return "clip"
    if any(name in names for names in OPTIMIZERS.values()):
        return "optimizer"
    if any(name in names for names in _SCHEDULERS.values()):
        return "schedule"
    if is_loss(name) or (name.endswith("Loss") and _plain_loss(name) in _LOSSES):
        return "loss"
    if is_layer(name):
        return "layer"
    return "function" if heard_name(name) is not None else ""


def common_call(name: str) -> str:
    """Return the common name of a function or class."""
    kind = kind_of(name)
    if kind == "function":
        return heard_name(name) or name
    if kind == "convert":
        return kind
    if kind == "layer":
        return common_kind(name.lower())
    if kind == "loss":
        return _plain_loss(name)
    if kind == "optimizer":
        return "sgd" if name == "Momentum" else name.lower()
    if kind == "schedule":
        return _SCHEDULES.get(name, name.removesuffix("LR").removesuffix("Decay"))
    if kind == "clip":
        return {"clip_grad_norm_": "ClipGradByGlobalNorm", "clip_grad_value_": "ClipGradByValue"}.get(name, name)
    return name


def whole_name(framework: str, name: str) -> str:
    """Return a function or class of the catalog with its module, in a framework; empty if it has none.

    Args:
        framework: the framework.
        name: its name in either framework.
    """
    kind, common = kind_of(name), common_call(name)
    if kind == "schedule" and framework in _SCHEDULERS and name not in _SCHEDULERS[framework]:
        name = next((each for each in sorted(_SCHEDULERS[framework]) if common_call(each) == common), "")
    spelling = SPELLINGS.get(framework)
    if spelling is None or not kind:
        return ""
    if kind == "optimizer":
        names = [name, *(each for each in sorted(OPTIMIZERS[framework]) if each.lower() == name.lower())]
        return next((f"{spelling.optimizers}.{each}" for each in names if each in OPTIMIZERS[framework]), "")
    if kind == "layer":
        # Of paddle's two spellings, BatchNorm2D comes before BatchNorm2d.
        names = [each for each in sorted(LAYERS[framework]) if common_kind(each.lower()) == common]
        names = [*(each for each in names if each.lower() == name.lower()), *names]
        return next((f"{spelling.layers}.{each}" for each in names if each in LAYERS[framework]), "")
    if kind == "loss":
        return f"{spelling.layers}.{'' if name.endswith('Loss') else 'functional.'}{name}"
    if kind == "schedule":
        module = "torch.optim.lr_scheduler" if framework == "torch" else "paddle.optimizer.lr"
        return f"{module}.{name}" if name in _SCHEDULERS[framework] else ""
    if kind == "clip":
        if name == "DataLoader":
            return "torch.utils.data.DataLoader" if framework == "torch" else "paddle.io.DataLoader"
        if framework == "torch":
            name = next(
                (each for each in sorted(_CLIPS) if each.startswith("clip") and common_call(each) == common), name
            )
        else:
            name = common
        module = "torch.nn.utils" if name.startswith("clip_grad") else "paddle.nn"
        return f"{module}.{name}" if module.startswith(framework) else ""
    name = _RENAMED[framework].get(name, name)
    return f"{spelling.layers}.functional.{name}" if name in _FUNCTIONAL else f"{framework}.{name}"


def value_text(node: ast.expr) -> str:
    """Return a number, an option, or a list of them as source text; empty for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = value_text(node.operand)
        return f"-{inner}" if inner else ""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and node.value not in _OPTIONS:
            return ""
        if node.value is None or isinstance(node.value, (bool, int, float)):
            return literal(node.value)
        return f'"{node.value}"' if isinstance(node.value, str) else ""
    if isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) <= 16:
        parts = [value_text(each) for each in node.elts]
        if not all(parts):
            return ""
        inner = ", ".join(parts)
        if isinstance(node, ast.List):
            return f"[{inner}]"
        return f"({inner}{',' if len(parts) == 1 else ''})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
        sides = [value_text(node.left), value_text(node.right)]
        sign = "/" if isinstance(node.op, ast.Div) else "*"
        return f"{sides[0]} {sign} {sides[1]}" if all(sides) else ""
    return ""


def number_of(node: ast.expr) -> float | None:
    """Return the number that an expression of numbers is; `None` for any other expression."""
    sign = 1.0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1.0, node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        with contextlib.suppress(OverflowError):
            return sign * float(node.value)
    return None


def converted(frameworks: tuple[str, str], call: str, argument: str, value: ast.expr) -> ast.expr:
    """Return the reference's value of an argument as the candidate's framework counts it.

    Args:
        frameworks: of the reference and the candidate.
        call: the name of the called function or class.
        argument: the common name of the argument.
        value: the reference's value.
    """
    if frameworks[0] == frameworks[1]:
        return value
    functions: Mapping[str, object] = SPELLINGS["paddle"].converted
    if argument not in functions or (argument == "momentum" and "norm" not in call.lower()):
        return value
    number = number_of(value)
    if argument == "momentum" and number is not None:
        return ast.Constant(round(1.0 - number, 12))
    if argument == "approximate" and isinstance(value, ast.Constant):
        return ast.Constant(value.value == "tanh" if frameworks[1] == "paddle" else "tanh" if value.value else "none")
    if argument == "count_include_pad" and isinstance(value, ast.Constant):
        return ast.Constant(not value.value)
    return value
