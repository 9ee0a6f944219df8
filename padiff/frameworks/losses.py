"""The calls of loss functions and of gradient clipping, under names and meanings that the frameworks share.

A function's tensors go by what they are to the loss (`ROLES`), whatever a framework calls its parameters; its settings
are all there, those that were not given with the framework's own defaults.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from padiff.frameworks.listening import UNKNOWN_CALL, Heard, Listening
from padiff.system.guard import Guard

#: By common name of the function, what its first tensors are to it.
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

#: Functions that give the same whichever of their two tensors comes first.
SYMMETRIC = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})

#: Tensors that are not what a loss is of, but belong to how it is counted.
WEIGHTS = ("weight", "pos_weight")

# What a framework calls a parameter that is a setting -> the common name. Whatever is not here is no setting.
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
# Names that a parameter may be given by, too (paddle takes torch's).
_ALIASES = {"label": "target", "labels": "target"}


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call of a loss function.

    Attributes:
        function: its common name.
        inputs: its tensors by what they are to it.
        weights: tensors that it weighs by.
        settings: plain values, by common names.
        output: what it gave.
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
        limit: what it clipped to.
        norm_type: the order of the norm; `None` where it is not known, or none is measured.
        total_norm: the norm before, as it was returned; `None` where it was not.
    """

    kind: str
    limit: float
    norm_type: float | None = None
    total_norm: Any = None


class LossObserver(Protocol):
    """Who hears of such calls.

    Attributes:
        guard: stops errors of the observer and of what calls it.
    """

    guard: Guard

    def wants(self) -> bool:
        """A call begins. Whether to hear of it when it has ended."""

    def loss(self, call: LossCall, others: Sequence[LossObserver]) -> None:
        """A loss function was called; others hear of it, too, and one of them may have the better claim."""

    def clip(self, call: ClipCall, others: Sequence[LossObserver]) -> None:
        """Gradients were clipped."""

    def backward_begins(self) -> None:
        """A backward begins."""

    def backward(self, tensor: Any) -> None:
        """A backward began at a tensor; it has ended."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function to listen to.

    Attributes:
        owner, attribute: where it is.
        name: its common name.
        given: settings that hold for it whatever it is called with.
        read: what of its arguments a framework puts differently: given them, settings and tensors that replace those of
            the tables. `None` where there is nothing.
    """

    owner: Any
    attribute: str
    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None


class LossCalls:
    """Listens to loss functions, clipping and backward from when it is made until `remove`.

    Of calls inside of one another only the outermost counts.

    Args:
        functions: the loss functions.
        clips: the functions that clip, each with what makes a `ClipCall` of its arguments and what it gave.
        backwards: the functions that run a backward; their first parameter is where it begins.
        observer: who hears.
        is_tensor: whether a value is a tensor of the framework.
        learning: whether a gradient may reach a tensor.
        silent: whether code that runs now only builds a program (a compiler's), or is transformed.
        aside: a context in which what is called is not seen by modes of the user's.
    """

    def __init__(
        self,
        functions: Iterable[Function],
        clips: Iterable[tuple[Any, str, Callable[[dict[str, Any], Any], ClipCall | None]]],
        backwards: Iterable[tuple[Any, str]],
        observer: LossObserver,
        is_tensor: Callable[[Any], bool],
        learning: Callable[[Any], bool],
        silent: Callable[[], bool],
        aside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.observer: LossObserver | None = observer
        self.guard = observer.guard
        # In a tuple: what compiles code follows what is called here, too, and takes a function that is an attribute for
        # a method.
        self._framework = is_tensor, learning, silent, aside
        self._inside = threading.local()
        self._functions: dict[str, Function] = {}
        self._clips: dict[str, Callable[[dict[str, Any], Any], ClipCall | None]] = {}
        self._listening: list[Listening] = []
        self._backwards: list[Listening] = []
        try:
            for number, function in enumerate(functions):
                key = f"{number} {function.name}"
                self._functions[key] = function
                self._listening.append(Listening(function.owner, function.attribute, self, key))
            for number, (owner, attribute, read) in enumerate(clips):
                key = f"{number} {attribute}"
                self._clips[key] = read
                self._listening.append(Listening(owner, attribute, self, key))
            for owner, attribute in backwards:
                self._backwards.append(Listening(owner, attribute, self, _BACKWARD))
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

    def enter(self, call: Heard) -> bool:
        observer = self.observer
        if observer is None or getattr(self._inside, "now", False) or self._framework[2]() or not observer.wants():
            return False
        self._inside.now = True
        if any(call.function is listening.function for listening in self._backwards):
            with self._framework[3]():
                observer.backward_begins()
        return True

    def leave(self, call: Heard, name: str, output: Any, failed: bool) -> None:
        self._inside.now = False
        observer = self.observer
        if failed or observer is None:
            return
        with suppress(*UNKNOWN_CALL), self._framework[3]():
            self._tell(observer, call, name, output)

    def _tell(self, observer: LossObserver, call: Heard, name: str, output: Any) -> None:
        others = [each.observer for each in call.listeners if isinstance(each, LossCalls) and each is not self]
        rivals = [each for each in others if each is not None]
        if name == _BACKWARD:
            where = call.arguments().get(call.names[0]) if call.names else None
            if self._framework[0](where):
                observer.backward(where)
        elif name in self._clips:
            clip = self._clips[name](call.arguments(), output)
            if clip is not None:
                observer.clip(clip, rivals)
        else:
            loss = self._read(self._functions[name], call, output)
            if loss is not None:
                observer.loss(loss, rivals)

    def _read(self, function: Function, call: Heard, output: Any) -> LossCall | None:
        """The call under common names; `None` where it was called in a way that is not known."""
        is_tensor, learning = self._framework[:2]
        arguments = call.arguments()
        named = [name for name in call.names if name != "self"]
        given = [arguments.get(name, arguments.get(_ALIASES.get(name, name))) for name in named]
        own = function.read(arguments) if function.read is not None else {}
        name = own.pop("function", function.name)
        roles = own.pop("roles", ROLES[name])
        settings = {
            _SETTINGS[key]: value
            for key, value in {**arguments, **function.given, **own}.items()
            if key in _SETTINGS and isinstance(value, (bool, int, float, str))
        }
        tensors = dict(zip(roles, given))
        if len(tensors) < len(roles) or not all(map(is_tensor, tensors.values())):
            return None
        if name in SYMMETRIC:
            first, second = tensors.values()
            # The prediction is what learns, whichever comes first.
            if learning(second) and not learning(first):
                tensors = dict(zip(roles, (second, first)))
        weights = {key: arguments[key] for key in WEIGHTS if is_tensor(arguments.get(key))}
        return LossCall(name, tensors, weights, settings, output)
