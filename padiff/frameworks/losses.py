"""Recording of calls of loss functions, loss scalers and gradient clipping, under names that the frameworks share.

The tensors of a call are named by their role in the loss (`ROLES`), whatever the framework names its parameters. The
settings of a call are complete: settings that the caller omitted have the framework's defaults.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from padiff.frameworks.interception import UNKNOWN_CALL, InterceptedCall, Interception
from padiff.system.guard import Guard

#: Roles of a loss function's first tensors, by common name of the function.
ROLES: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("logits", "labels"),
    "linear_cross_entropy": ("hidden", "linear_weight", "labels"),
    "nll_loss": ("log_probabilities", "labels"),
    "binary_cross_entropy": ("probabilities", "labels"),
    "binary_cross_entropy_with_logits": ("logits", "labels"),
    "sigmoid_focal_loss": ("logits", "labels"),
    "dice_loss": ("probabilities", "labels"),
    "mse_loss": ("prediction", "target"),
    "l1_loss": ("prediction", "target"),
    "smooth_l1_loss": ("prediction", "target"),
    "huber_loss": ("prediction", "target"),
    "kl_div": ("log_probabilities", "target"),
    "poisson_nll_loss": ("prediction", "target"),
    "gaussian_nll_loss": ("prediction", "target", "variance"),
    "soft_margin_loss": ("scores", "labels"),
    "multi_margin_loss": ("scores", "labels"),
    "multilabel_margin_loss": ("scores", "labels"),
    "multilabel_soft_margin_loss": ("scores", "labels"),
    "hinge_embedding_loss": ("distance", "labels"),
    "cosine_embedding_loss": ("first", "second", "labels"),
    "margin_ranking_loss": ("first", "second", "labels"),
    "triplet_margin_loss": ("anchor", "positive", "negative"),
    "ctc_loss": ("log_probabilities", "labels", "input_lengths", "label_lengths"),
}

#: Loss functions whose result does not depend on the order of their two tensors.
SYMMETRIC = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})

#: Tensors that weight a loss, and are no inputs of it.
WEIGHTS = ("weight", "pos_weight")

# A framework's name of a setting -> the common name. Other parameters are no settings.
_SETTINGS = {
    **{name: name for name in (
        "reduction", "ignore_index", "label_smoothing", "axis", "soft_label", "use_softmax", "delta", "beta",
        "log_target", "margin", "p", "swap", "full", "log_input", "blank", "zero_infinity", "alpha", "gamma", "eps",
    )},
    "epsilon": "eps",
}  # fmt: skip


#: Common names of all settings of loss functions.
LOSS_SETTINGS = frozenset(_SETTINGS.values())
_BACKWARD = "backward"
# Alternative names of a parameter (paddle also accepts torch's names).
_ALIASES = {"label": "target", "labels": "target"}


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call of a loss function.

    Attributes:
        function: the function's common name.
        inputs: the tensors by role.
        weights: the tensors that weight the loss, by parameter name.
        settings: plain values, by common names.
        output: the result of the call.
    """

    function: str
    inputs: Mapping[str, Any]
    weights: Mapping[str, Any]
    settings: Mapping[str, Any]
    output: Any


@dataclass(frozen=True, slots=True)
class ClipCall:
    """A call that clipped gradients.

    Attributes:
        kind: ``global_norm``, ``norm`` (of another order) or ``value``.
        limit: the largest norm or absolute value after clipping.
        norm_type: the order of the norm; `None` if it is unknown or the call clips by value.
        total_norm: the norm before clipping, from the result or the arguments of the call; `None` if neither has it.
    """

    kind: str
    limit: float
    norm_type: float | None = None
    total_norm: Any = None


def clip_by_norm(arguments: dict[str, Any], output: Any) -> ClipCall:
    """Return a call of ``clip_grad_norm_``, whose result is the norm before."""
    order = float(arguments["norm_type"])
    return ClipCall("global_norm" if order == 2 else "norm", float(arguments["max_norm"]), order, output)


def clip_by_value(arguments: dict[str, Any], output: Any) -> ClipCall:
    """Return a call of ``clip_grad_value_``."""
    return ClipCall("value", float(arguments["clip_value"]))


class LossObserver(Protocol):
    """An observer of loss functions, gradient clipping and backward.

    Attributes:
        guard: stops errors of the observer and of the code that calls the observer.
    """

    guard: Guard

    def is_listening(self) -> bool:
        """Return True to be notified when the call that begins now returns."""

    def loss(self, call: LossCall, others: Sequence[LossObserver]) -> None:
        """Note a call of a loss function. ``others`` are notified too, and the call may belong to one of them."""

    def clip(self, call: ClipCall, others: Sequence[LossObserver]) -> None:
        """Note that gradients were clipped; ``others`` are notified too."""

    def scaled(self, scale: float) -> None:
        """Note that a scaler of mixed precision multiplied a loss by this scale."""

    def backward_begins(self) -> None:
        """Note that a backward begins."""

    def backward(self, tensor: Any) -> None:
        """Note that the backward from this tensor has ended."""


@dataclass(frozen=True, slots=True)
class Function:
    """A loss function to intercept.

    Attributes:
        owner, attribute: the module or class that has the function, and its name there.
        name: the function's common name.
        given: settings that are fixed for this function, whatever its arguments.
        read: returns, for the arguments of a call, settings that replace those read by the tables; the keys
            ``function`` and ``roles`` replace the common name and the roles. `None` if the tables suffice.
    """

    owner: Any
    attribute: str
    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None


class LossCalls:
    """A listener of loss functions, clipping and backward, active from its creation until `remove`.

    Of nested calls only the outermost counts.

    Args:
        functions: the loss functions.
        clips: the functions that clip, each with a function that builds a `ClipCall` from its arguments and result.
        scalers: the methods of loss scalers that scale a loss, each with a function that reads the scale of a scaler.
        backwards: the functions that run a backward; their first parameter is the tensor where the backward begins.
        observer: the observer to notify.
        is_tensor: returns True for a tensor of the framework.
        learning: returns True if a gradient may reach a tensor.
        silent: returns True while code runs only to build a program (under a compiler), or is transformed.
        aside: returns a context that hides calls from the user's dispatch modes.
    """

    def __init__(
        self,
        functions: Iterable[Function],
        clips: Iterable[tuple[Any, str, Callable[[dict[str, Any], Any], ClipCall | None]]],
        scalers: Iterable[tuple[Any, str, Callable[[Any], float]]],
        backwards: Iterable[tuple[Any, str]],
        observer: LossObserver,
        is_tensor: Callable[[Any], bool],
        learning: Callable[[Any], bool],
        silent: Callable[[], bool],
        aside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.observer: LossObserver | None = observer
        self.guard = observer.guard
        # In a tuple, because compilers trace these calls too, and treat a function in an attribute as a method.
        self._framework = is_tensor, learning, silent, aside
        self._inside = threading.local()
        self._functions: dict[str, Function] = {}
        self._clips: dict[str, Callable[[dict[str, Any], Any], ClipCall | None]] = {}
        self._scalers: dict[str, Callable[[Any], float]] = {}
        self._listening: list[Interception] = []
        self._backwards: list[Interception] = []
        try:
            for number, function in enumerate(functions):
                key = f"{number} {function.name}"
                self._functions[key] = function
                self._listening.append(Interception(function.owner, function.attribute, self, key))
            for number, (owner, attribute, read) in enumerate(clips):
                key = f"{number} {attribute}"
                self._clips[key] = read
                self._listening.append(Interception(owner, attribute, self, key))
            for number, (owner, attribute, scale_of) in enumerate(scalers):
                key = f"{number} {attribute}"
                self._scalers[key] = scale_of
                self._listening.append(Interception(owner, attribute, self, key))
            for owner, attribute in backwards:
                self._backwards.append(Interception(owner, attribute, self, _BACKWARD))
                self._listening.append(self._backwards[-1])
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self.observer = None
        self._backwards.clear()
        while self._listening:
            self._listening[-1].remove()
            self._listening.pop()

    # -- as a listener -------------------------------------------------------------------------------------

    def enter(self, call: InterceptedCall) -> bool:
        observer = self.observer
        if (
            observer is None
            or getattr(self._inside, "now", False)
            or self._framework[2]()
            or not observer.is_listening()
        ):
            return False
        self._inside.now = True
        if any(call.function is listening.function for listening in self._backwards):
            with self._framework[3]():
                observer.backward_begins()
        return True

    def exit(self, call: InterceptedCall, name: str, output: Any, failed: bool) -> None:
        self._inside.now = False
        observer = self.observer
        if failed or observer is None:
            return
        with suppress(*UNKNOWN_CALL), self._framework[3]():
            self._tell(observer, call, name, output)

    def _tell(self, observer: LossObserver, call: InterceptedCall, name: str, output: Any) -> None:
        others = [each.observer for each in call.listeners if isinstance(each, LossCalls) and each is not self]
        rivals = [each for each in others if each is not None]
        if name == _BACKWARD:
            where = call.arguments().get(call.names[0]) if call.names else None
            if self._framework[0](where):
                observer.backward(where)
        elif name in self._scalers:
            observer.scaled(self._scalers[name](call.arguments()["self"]))
        elif name in self._clips:
            clip = self._clips[name](call.arguments(), output)
            if clip is not None:
                observer.clip(clip, rivals)
        else:
            loss = self._read(self._functions[name], call, output)
            if loss is not None:
                observer.loss(loss, rivals)

    def _read(self, function: Function, call: InterceptedCall, output: Any) -> LossCall | None:
        """Return the call under common names; `None` if its arguments have an unknown form."""
        is_tensor, learning = self._framework[:2]
        arguments = call.arguments()
        named = [name for name in call.names if name != "self"]
        positional = [arguments.get(name, arguments.get(_ALIASES.get(name, name))) for name in named]
        specific = function.read(arguments) if function.read is not None else {}
        name = specific.pop("function", function.name)
        roles = specific.pop("roles", ROLES[name])
        settings = {
            _SETTINGS[key]: value
            for key, value in {**arguments, **function.given, **specific}.items()
            if key in _SETTINGS and isinstance(value, (bool, int, float, str))
        }
        tensors = dict(zip(roles, positional))
        if len(tensors) < len(roles) or not all(map(is_tensor, tensors.values())):
            return None
        if name in SYMMETRIC:
            first, second = tensors.values()
            # The prediction is the tensor that needs a gradient, whichever comes first.
            if learning(second) and not learning(first):
                tensors = dict(zip(roles, (second, first)))
        weights = {key: arguments[key] for key in WEIGHTS if is_tensor(arguments.get(key))}
        return LossCall(name, tensors, weights, settings, output)
