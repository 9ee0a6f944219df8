"""The code of each framework for layers, functions and optimizers, and the content of a script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from padiff.errors import PadiffError, UsageError
from padiff.frameworks.losses import ROLES, WEIGHTS
from padiff.records import TensorSource
from padiff.records.sources import DTYPES
from padiff.system.code import refused

#: Common name of a function -> operator; ``{0}`` and ``{1}`` are the operands in order.
OPERATORS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "matmul": "{0} @ {1}",
    "pow": "{0} ** {1}", "rsub": "{1} - {0}", "rdiv": "{1} / {0}", "rmatmul": "{1} @ {0}", "rpow": "{1} ** {0}",
    "remainder": "{0} % {1}", "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "logical_and": "{0} & {1}", "logical_or": "{0} | {1}",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "neg": "-{0}", "logical_not": "~{0}",
}  # fmt: skip

# Functions in the framework's module `nn.functional`.
_FUNCTIONAL = (
    "linear bilinear embedding conv1d conv2d conv3d layer_norm batch_norm group_norm instance_norm normalize "
    "local_response_norm interpolate pad max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d grid_sample pixel_shuffle unfold fold scaled_dot_product_attention softmax log_softmax "
    "sigmoid tanh relu relu6 leaky_relu elu selu celu gelu mish hardswish hardsigmoid hardtanh softplus prelu glu "
    "softsign "
    "hardshrink softshrink tanhshrink one_hot cross_entropy mse_loss l1_loss smooth_l1_loss nll_loss kl_div "
    "binary_cross_entropy binary_cross_entropy_with_logits"
)
# Functions of the framework's top module, with the same name in both frameworks.
_OWN = (
    "mean sum max min prod var std exp log sqrt rsqrt abs sin cos tan atan sinh cosh expm1 log1p floor round ceil erf "
    "square cumsum cumprod where maximum minimum logsumexp einsum zeros ones full arange linspace eye zeros_like "
    "ones_like full_like triu tril outer isnan isinf sign topk sort argmax argmin argsort addmm stack roll flip clone "
    "reciprocal lerp gather index_select masked_select dot median meshgrid"
)

# Functions that are methods of their first tensor.
_TORCH_METHODS = (
    "reshape view flatten unflatten squeeze unsqueeze expand transpose permute movedim contiguous split chunk "
    "unbind narrow select tile repeat repeat_interleave detach clone"
)
_PADDLE_METHODS = (
    "reshape flatten unflatten squeeze unsqueeze expand expand_as transpose split chunk unbind tile "
    "repeat_interleave detach clone view broadcast_to"
)


def _in(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}.{name}" for name in names.split()}


@dataclass(frozen=True)
class Language:
    """The code of one framework that a script needs.

    Attributes:
        packages: packages that the script imports besides numpy and safetensors.
        functional: module of functional calls.
        prelude: definitions of ``given`` (a tensor by name, in the run's dtype or another one), ``cast``, ``array`` and
            ``gradient``.
        calls: common name of a function -> qualified name.
        methods: common name of a function -> name of the tensor method.
        cast: format of a cast.
        autocast: format of the line that opens an autocast, for a dtype, level and device; it is off if `compute` has
            another dtype.
        layers: common kind of layer -> function, if the framework uses another name.
        arguments: ``function.setting`` -> argument, if the function and the layer use different names.
        optimizer: format of the lines that apply an optimizer over all steps.
    """

    packages: tuple[str, ...]
    functional: str
    prelude: str
    calls: Mapping[str, str]
    methods: Mapping[str, str]
    cast: str
    autocast: str
    layers: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    optimizer: tuple[str, ...] = ()


_TORCH = Language(
    packages=("torch",),
    functional="torch.nn.functional",
    prelude='''def given(name, dtype=None):
    """A recorded tensor, in the dtype of the run or in another one; integers stay what they are."""
    tensor = torch.tensor(TENSORS[name])
    if name in LEARNS or tensor.is_floating_point():
        tensor = tensor.to(getattr(torch, dtype or DTYPES[name]))
    return tensor.requires_grad_() if name in LEARNS else tensor


def cast(tensor, name, dtype):
    """As the run casts; what is computed in another dtype stays so."""
    target = getattr(torch, name)
    return tensor.to(getattr(torch, dtype) if dtype and target.is_floating_point else target)


def array(tensor):
    return tensor.detach().to(torch.float64).numpy()


def gradient(outputs, gradients, of):
    torch.autograd.backward(outputs, gradients)
    return of.grad
''',
    calls={
        **_in("torch.nn.functional", _FUNCTIONAL),
        **_in("torch", _OWN),
        "swish": "torch.nn.functional.silu",
        "cat": "torch.cat",
        "norm": "torch.linalg.vector_norm",
        "clamp": "torch.clamp",
        "masked_fill": "torch.masked_fill",
        "logsigmoid": "torch.nn.functional.logsigmoid",
        "rms_norm": "torch.nn.functional.rms_norm",
        "conv_transpose1d": "torch.nn.functional.conv_transpose1d",
        "baddbmm": "torch.baddbmm",
        "conv_transpose2d": "torch.nn.functional.conv_transpose2d",
        "matmul": "torch.matmul",
        "conv_transpose3d": "torch.nn.functional.conv_transpose3d",
        "add": "torch.add",
        "sub": "torch.sub",
        "tanh": "torch.tanh",
        "sigmoid": "torch.sigmoid",
        "threshold": "torch.nn.functional.threshold",
    },
    methods={name: name for name in _TORCH_METHODS.split()},
    cast="cast({0}, {1}, dtype)",
    autocast="with torch.autocast({2!r}, torch.{0}, enabled=dtype is None):",
    layers={
        "convtranspose1d": "conv_transpose1d",
        "convtranspose2d": "conv_transpose2d",
        "rmsnorm": "rms_norm",
        "convtranspose3d": "conv_transpose3d",
        "logsigmoid": "logsigmoid",
        "silu": "silu",
    },
    optimizer=(
        "weight = torch.nn.Parameter(given('weight_0', dtype))",
        "optimizer = {call}",
        "for step, rate in enumerate(RATES):",
        "    before = given(f'weight_{{step}}', dtype)",
        "    with torch.no_grad():",
        "        weight.copy_(before)",
        "    for group in optimizer.param_groups:",
        "        group['lr'] = rate",
        "    weight.grad = given(f'gradient_{{step}}', dtype)",
        "    optimizer.step()",
        "made = weight - before",
    ),
)
_PADDLE = Language(
    packages=("paddle",),
    functional="paddle.nn.functional",
    prelude='''def given(name, dtype=None):
    """A recorded tensor, in the dtype of the run or in another one; integers stay what they are."""
    tensor = paddle.to_tensor(TENSORS[name])
    if name in LEARNS or tensor.is_floating_point():
        tensor = tensor.astype(dtype or DTYPES[name])
    tensor.stop_gradient = name not in LEARNS
    return tensor


def cast(tensor, name, dtype):
    """As the run casts; what is computed in another dtype stays so."""
    return tensor.astype(dtype if dtype and "float" in name else name)


def array(tensor):
    return tensor.detach().astype("float64").numpy()


def gradient(outputs, gradients, of):
    paddle.autograd.backward(outputs, gradients)
    return of.grad
''',
    calls={
        **_in("paddle.nn.functional", _FUNCTIONAL),
        **_in("paddle", _OWN),
        "swish": "paddle.nn.functional.silu",
        "cat": "paddle.concat",
        "norm": "paddle.linalg.norm",
        "clamp": "paddle.clip",
        "masked_fill": "paddle.masked_fill",
        "logsigmoid": "paddle.nn.functional.log_sigmoid",
        "matmul": "paddle.matmul",
        "add": "paddle.add",
        "conv_transpose1d": "paddle.nn.functional.conv1d_transpose",
        "sub": "paddle.subtract",
        "scale": "paddle.scale",
        "conv_transpose2d": "paddle.nn.functional.conv2d_transpose",
        "pow": "paddle.pow",
        "mul": "paddle.multiply",
        "conv_transpose3d": "paddle.nn.functional.conv3d_transpose",
        "div": "paddle.divide",
    },
    methods={name: name for name in _PADDLE_METHODS.split()} | {"contiguous": "contiguous", "movedim": "moveaxis"},
    cast="cast({0}, {1}, dtype)",
    autocast="with paddle.amp.auto_cast(enable=dtype is None, dtype={0!r}, level={1!r}):",
    layers={
        "convtranspose1d": "conv1d_transpose",
        "convtranspose2d": "conv2d_transpose",
        "convtranspose3d": "conv3d_transpose",
        "logsigmoid": "log_sigmoid",
    },
    arguments={"instance_norm.eps": "eps"},
    optimizer=(
        "weight = paddle.create_parameter(TENSORS['weight_0'].shape, dtype or DTYPES['weight_0'])",
        "optimizer = {call}",
        "for step, rate in enumerate(RATES):",
        "    before = given(f'weight_{{step}}', dtype)",
        "    weight.set_value(before)",
        "    optimizer.set_lr(rate)",
        "    (weight * given(f'gradient_{{step}}', dtype)).sum().backward()",
        "    optimizer.step()",
        "    optimizer.clear_grad()",
        "made = weight - before",
    ),
)
LANGUAGES = {"torch": _TORCH, "paddle": _PADDLE}


#: How to record what is missing.
RECORD_IN_FULL = (
    'Record that step in full on both sides: `detail="full"` keeps it, '
    "`replay_every_n_steps=1` also whatever goes into a layer; `padiff watch`, or a callback with `reference=`, asks "
    "for full tensors around a diff by itself (zoom)"
)


class CannotWriteError(UsageError):
    """Raised if no script can be written for a first diff; the message gives the reason."""


@dataclass
class Case:
    """The computation that one side's script repeats.

    Attributes:
        framework: the side's framework.
        what: description of the computation, in words.
        given: input tensors by variable name.
        dtypes: dtype of each input tensor in the run.
        origins: description of each input tensor, for a comment.
        learns: names of tensors that require a gradient.
        lines: lines of code, which set the variable ``made``.
        own, other: the result recorded on this side, and the one of the other side in this side's layout.
        limit: allowed relative L2 error.
        remarks: sentences for the script's docstring.
        autocast: dtype, level and device of the run's autocast; `None`: no autocast.
    """

    framework: str
    what: str
    given: dict[str, np.ndarray] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    learns: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    own: np.ndarray | None = None
    other: np.ndarray | None = None
    limit: float = 0.0
    remarks: list[str] = field(default_factory=list)
    autocast: tuple[str, str, str] | None = None

    def give(self, wish: str, source: TensorSource | None, dtype: str, what: str) -> str:
        """Add a recorded tensor to the inputs, and return the name of its variable.

        Args:
            wish: preferred name of the variable.
            source: values of the tensor.
            dtype: dtype of the tensor in the run.
            what: description of the tensor, for comments and errors.

        Raises:
            CannotWriteError: the values were not recorded, or can't be read.
            ForeignCodeError: no framework has the dtype.
        """
        return self.give_array(wish, values_of(source, what), dtype, what)

    def give_array(self, wish: str, array: np.ndarray, dtype: str, what: str = "") -> str:
        """Add an array to the inputs, and return the name of its variable.

        Raises:
            ForeignCodeError: no framework has the dtype.
        """
        if dtype not in DTYPES:
            raise refused("the dtype", dtype)
        name = base = variable(wish)
        number = 1
        while name in self.given:
            number += 1
            name = f"{base}_{number}"
        self.given[name] = array
        self.dtypes[name] = dtype
        self.origins[name] = what
        return name


def values_of(source: TensorSource | None, what: str) -> np.ndarray:
    """Return the values of a recorded tensor in a dtype that numpy knows.

    Raises:
        CannotWriteError: the values were not recorded, or can't be read.
    """
    if source is None or source.sketched:
        available = "nothing" if source is None else "only a sketch"
        raise CannotWriteError(f"of {what} {available} was kept. {RECORD_IN_FULL}")
    try:
        array = source.read()
    except PadiffError as error:
        raise CannotWriteError(f"{what} can't be read: {error}") from error
    return plain_array(array)


def plain_array(array: np.ndarray) -> np.ndarray:
    """Return an array in one of numpy's dtypes: bfloat16 and float8 become float32, which holds all of their values."""
    return np.ascontiguousarray(array if array.dtype.kind in "biuf" else array.astype(np.float32))


def comment(text: str) -> str:
    """Return a text for a comment: in ASCII, on one line."""
    return text.encode("unicode_escape", "surrogatepass").decode("ascii")


def variable(wish: str) -> str:
    """Return a safe variable name: a word of `VARIABLES`, perhaps with a number, else ``x``."""
    name, number = re.fullmatch(r"(.*?)(_[0-9]+)?", wish.rpartition("/")[2], re.DOTALL).groups("")  # type: ignore[union-attr]
    if name not in VARIABLES:
        return "x"
    return f"x_{name}" if name in _TAKEN and not number else name + number


#: Names of variables for recorded tensors: roles in layers, losses and optimizers, and names of the functions that
#: returned the tensors.
VARIABLES = frozenset({"x", "gradient", "running_mean", "running_var", "in_proj_weight", "in_proj_bias"}).union(
    WEIGHTS, ("bias",), *ROLES.values(), *(LANGUAGES[name].calls for name in LANGUAGES), OPERATORS
)
# Variable names that the script's template uses.
_TAKEN = frozenset(
    (
        *("made", "given", "compute", "cast", "gradient", "array", "off", "dtype", "loss", "float", "torch", "paddle"),
        *("np", "sys", "optimizer", "rate", "step", "before"),
    )
)


def tensors_of(case: Case) -> Mapping[str, np.ndarray]:
    """Return the tensors of the script's file: inputs, and the recorded results of both sides."""
    tensors = dict(case.given)
    assert case.own is not None and case.other is not None
    tensors["recorded.here"] = plain_array(case.own)
    tensors["recorded.there"] = plain_array(case.other)
    return tensors
