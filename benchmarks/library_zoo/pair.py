"""What a pair is, and how its weights and outputs are handled without padiff."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import torch

#: torch's tensors, by name, in order of definition.
State = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pair:
    """Two models that should be paired.

    ``same`` says whether they compute the same function, given equal weights; ``why`` says what differs if not, or what
    was set to make them equal. ``truth`` maps torch's tensors to paddle's names (matrices still as torch has them), by
    hand; None if both models define equal tensors in the same order. It never goes to padiff: it proves what ``same``
    says.
    """

    name: str
    build: Callable[[], tuple[Any, Any]]
    inputs: Callable[[], tuple[Any, Any]]
    same: bool = True
    why: str = ""
    truth: Callable[[State], State] | None = None
    #: So many tensors of the output are compared.
    outputs: int = 1
    #: Dropout layers keep their probability; for evaluation it makes no difference but to paddle's downscale_in_infer.
    dropout: bool = False
    #: Of the weights that are drawn; less where the model's branches would let activations explode.
    scale: float = 1.0

    def models(self) -> tuple[torch.nn.Module, paddle.nn.Layer]:
        """Both models for evaluation, torch's with weights of which no two are alike."""
        torch.manual_seed(0)
        paddle.seed(1)
        reference, candidate = self.build()
        vary(reference, self.scale)
        if not self.dropout:
            for layer in (*reference.modules(), *candidate.sublayers()):
                if type(layer).__name__ == "Dropout":
                    layer.p = 0.0
        return reference.eval(), candidate.eval()

    def run(self, reference: Any, candidate: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What the two models make of the same inputs."""
        given = self.inputs()
        with torch.no_grad():
            own = flat(_called(reference, given[0]))[: self.outputs]
        with paddle.no_grad():
            other = flat(_called(candidate, given[1]))[: self.outputs]
        return [x.detach().numpy() for x in own], [x.numpy() for x in other]


def vary(model: torch.nn.Module, scale: float) -> None:
    """Draw all weights anew, so that no two are alike and one in the wrong place shows in the output.

    As models come, biases are zeros, layers of a stack are copies, and matrices are so small that queries and keys
    could be swapped without a trace.
    """
    draw = torch.Generator().manual_seed(2)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.rand(tensor.shape, generator=draw) - 0.5

    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() < 2:
                tensor += 0.3 * noise(tensor)
            elif tensor.shape[0] == 1:
                tensor.normal_(0.0, 0.5, generator=draw)
            else:
                gain = 2.0 if tensor.dim() > 2 else 1.0
                tensor.normal_(0.0, scale * (gain * tensor.shape[0] / tensor.numel()) ** 0.5, generator=draw)
        for name, tensor in model.named_buffers():
            if name.endswith("running_mean"):
                tensor += 0.3 * noise(tensor)
            elif name.endswith("running_var"):
                tensor += 0.6 * noise(tensor)


def error(reference: list[np.ndarray], candidate: list[np.ndarray]) -> float:
    """The largest relative L2 error of the outputs; infinite if their number or shapes differ."""
    if len(reference) != len(candidate) or any(a.shape != b.shape for a, b in zip(reference, candidate)):
        return float("inf")
    off = [np.linalg.norm((a - b).astype("f8")) / np.linalg.norm(a.astype("f8")) for a, b in zip(reference, candidate)]
    return float(max(off))


def flat(output: Any) -> list[Any]:
    """The floating-point tensors of a model's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, paddle.Tensor):
        return [output] if output.dtype in (paddle.float32, paddle.float64) else []
    if isinstance(output, Mapping):
        output = list(output.values())
    return [x for part in output for x in flat(part)] if isinstance(output, (list, tuple)) else []


def _called(model: Any, given: Any) -> Any:
    return model(**given) if isinstance(given, dict) else model(*given)


def both(array: np.ndarray) -> tuple[torch.Tensor, paddle.Tensor]:
    """The same numbers for torch and for paddle."""
    return torch.from_numpy(array.copy()), paddle.to_tensor(array)


def images(size: int, batch: int = 2) -> Callable[[], tuple[Any, Any]]:
    """Random images, as the models' only input."""

    def made() -> tuple[Any, Any]:
        reference, candidate = both(np.random.default_rng(0).standard_normal((batch, 3, size, size)).astype("float32"))
        return (reference,), (candidate,)

    return made


def tokens(names: tuple[str, ...] = ("input_ids",), batch: int = 2) -> Callable[[], Any]:
    """Random token ids by keyword, without the ids that often stand for padding and the like."""

    def made() -> tuple[Any, Any]:
        draw = np.random.default_rng(0)
        pairs = {name: both(draw.integers(5, 64, (batch, 9))) for name in names}
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}

    return made


def renamed(*rules: tuple[str, str]) -> Callable[[State], State]:
    """A ``truth`` that only renames: each rule is a regular expression and what to put in its place."""
    rules = (*rules, (r"running_mean$", "_mean"), (r"running_var$", "_variance"))

    def mapped(state: State) -> State:
        made: State = {}
        for name, value in state.items():
            for pattern, text in rules:
                name = re.sub(pattern, text, name)
            made[name] = value
        return made

    return mapped


def by_hand(pair: Pair, reference: torch.nn.Module, candidate: paddle.nn.Layer) -> list[str]:
    """Carry torch's weights to paddle by the pair's ``truth``; returns what does not fit."""
    state = {k: v.numpy() for k, v in reference.state_dict().items() if v.is_floating_point()}
    wanted = {k: v for k, v in candidate.state_dict().items() if v.dtype == paddle.float32}
    values = pair.truth(state) if pair.truth is not None else dict(zip(wanted, state.values()))
    linear = {
        f"{path}.weight".lstrip(".")
        for path, layer in candidate.named_sublayers(include_self=True)
        if isinstance(layer, paddle.nn.Linear)
    }
    covered = {id(wanted[name]) for name in values.keys() & wanted.keys()}
    faults = [f"not in paddle: {name}" for name in values.keys() - wanted.keys()]
    faults += [f"not in truth: {k} {list(v.shape)}" for k, v in wanted.items() if id(v) not in covered]
    if pair.truth is None and len(state) != len(wanted):
        faults.append(f"{len(state)} tensors against {len(wanted)}")
    for name in values.keys() & wanted.keys():
        value = values[name].T if name in linear else values[name]
        if list(value.shape) != list(wanted[name].shape):
            faults.append(f"{name}: {list(value.shape)} against {list(wanted[name].shape)}")
        else:
            wanted[name].set_value(np.ascontiguousarray(value))
    return faults
