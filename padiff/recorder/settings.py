"""What a training declares beside its tensors: its optimizers' settings, and what its host says.

Read when recording begins, and then in due steps as an optimizer consumes its gradients: a look whether anything is
other than before. What is called while a step runs (the loss, clipping), and which layers train, is in the step's
capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from padiff.frameworks.base import Framework
from padiff.frameworks.optimizing import OptimizerSettings
from padiff.recorder.layers import Layers
from padiff.records.settings import plain_setting, settings_delta
from padiff.system.guard import Tolerated

# What is seen of calls is known until calls show something else: not every step is looked at as closely.
_OF_CALLS = ("loss.", "clip.")


class DeclaredSettings:
    """What one training declares.

    Args:
        layers: the model's; parameters are named after them.
        optimizers: those that are hooked.

    Attributes:
        first: what held in the first recorded step, which is what a run says of itself; `None` before.
    """

    def __init__(self, framework: Framework, layers: Layers, optimizers: Sequence[Any]) -> None:
        self._framework, self._layers, self._optimizers = framework, layers, optimizers
        self._host: dict[str, Any] = {}
        self._stamps: dict[int, Any] = {}
        self._read: dict[int, dict[str, Any]] = {}
        self._rates: dict[str, Any] = {}
        self._calls: dict[str, Any] = {}
        self._known: tuple[Any, dict[str, Any]] | None = None
        self.first: dict[str, Any] | None = None

    def declare(self, settings: Mapping[str, Any]) -> None:
        """Take over what a host says of the training."""
        plain = {name: plain_setting(value) for name, value in settings.items()}
        self._host |= {name: value for name, value in plain.items() if value is not None}
        self._known = None

    def read(self) -> dict[str, Any]:
        """What is known before anything runs."""
        for optimizer in self._optimizers:
            self.look(optimizer)
        return self._together()

    def look(self, optimizer: Any) -> None:
        """An optimizer is about to step: see what it is set to, if that may be other than before."""
        key = id(optimizer)
        # Never the training's trouble: of an optimizer that can't be asked nothing is known.
        with Tolerated():
            stamp = self._framework.optimizers.settings_stamp(optimizer)
            if key in self._stamps and self._stamps[key] == stamp:
                return
            self._stamps[key] = stamp
            self._known = None
            self._read[key] = {}
            number = next(k for k, one in enumerate(self._optimizers) if one is optimizer)
            self._read[key] = self._flat(f"optimizer.{number}", self._framework.optimizers.settings(optimizer))

    def of_step(self, captured: Mapping[str, Any]) -> dict[str, Any]:
        """What a step has to say: what differs from the first one.

        Args:
            captured: what its capture saw.
        """
        if self._known is None or self._known[0] != captured:
            self._take(captured)
            now = self._together()
            if self.first is None:
                self.first = now
            self._known = dict(captured), settings_delta(self.first, now)
        return self._known[1]

    def _take(self, captured: Mapping[str, Any]) -> None:
        plain = {name: plain_setting(value) for name, value in captured.items()}
        seen = tuple(family for family in _OF_CALLS if any(name.startswith(family) for name in plain))
        kept = {n: v for n, v in self._calls.items() if n.startswith(_OF_CALLS) and not (seen and n.startswith(seen))}
        self._calls = kept | {name: value for name, value in plain.items() if value is not None}

    def _together(self) -> dict[str, Any]:
        found = dict(self._host)
        for optimizer in self._optimizers:
            found |= self._read.get(id(optimizer), {})
        return found | self._calls

    def _flat(self, prefix: str, settings: OptimizerSettings) -> dict[str, Any]:
        sites = self._sites()
        found: dict[str, Any] = {f"{prefix}.rule": settings.rule}
        found |= {f"{prefix}.{name}": plain_setting(value) for name, value in settings.others.items()}
        for number, group in enumerate(settings.groups):
            own = f"{prefix}.group.{number}"
            found |= {f"{own}.{name}": plain_setting(value) for name, value in group.values.items()}
            if f"{own}.lr" in found:
                # As it was at first: every step's is a record.
                found[f"{own}.lr"] = self._rates.setdefault(f"{own}.lr", found[f"{own}.lr"])
            trained = [p for p in group.parameters if self._framework.tensors.trainable(p)]
            names = [sites.get(id(parameter)) for parameter in trained]
            found[f"{own}.parameters"] = [name for name in names if name is not None]
            if None in names:
                found[f"{own}.others"] = names.count(None)  # of another model, or copies of the model's
        return {name: value for name, value in found.items() if value is not None}

    def _sites(self) -> dict[int, str]:
        """What each parameter is called: by the first path that reaches it."""
        found: dict[int, str] = {}
        for node in self._layers.nodes:
            for slot, tensor, role in self._framework.layers.parameters(node.layer):
                if role == "parameter":
                    found.setdefault(id(tensor), f"{node.path}/{slot}")
        return found
