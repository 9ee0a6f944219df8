"""Settings that a training declares: those of its optimizers, and those that its host (trainer) names.

Settings are read when recording begins. In due steps they are checked for changes whenever an optimizer is about to
step. The capture of a step adds the settings of losses and clipping, and the training modes of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from padiff.frameworks.base import Framework
from padiff.frameworks.optimizing import OptimizerSettings
from padiff.recorder.layers import Layers
from padiff.records.settings import plain_setting, settings_delta
from padiff.system.guard import Tolerated

# Settings read from calls stay valid until later calls show others, as not every step shows these calls.
_OF_CALLS = ("loss.", "clip.")


class DeclaredSettings:
    """Declared settings of one training.

    Args:
        layers: the model's layers; parameters are named by layer path and slot.
        optimizers: the hooked optimizers.

    Attributes:
        first: settings in the first recorded step, which are stored with the run; `None` before that step.
    """

    def __init__(self, framework: Framework, layers: Layers, optimizers: Sequence[Any]) -> None:
        self._framework, self._layers, self._optimizers = framework, layers, optimizers
        self._host: dict[str, Any] = {}
        self._stepped: list[Any] = []
        self._stamps: dict[int, Any] = {}
        self._read: dict[int, dict[str, Any]] = {}
        self._rates: dict[tuple[int, int], Any] = {}
        self._calls: dict[str, Any] = {}
        self._known: tuple[Any, dict[str, Any]] | None = None
        self.first: dict[str, Any] | None = None

    def declare(self, settings: Mapping[str, Any]) -> None:
        """Add settings that a host (trainer) names; values that are not plain are ignored."""
        plain = {name: plain_setting(value) for name, value in settings.items()}
        self._host |= {name: value for name, value in plain.items() if value is not None}
        self._known = None

    def read(self) -> dict[str, Any]:
        """Return the settings that are known before anything runs."""
        for optimizer in self._optimizers:
            self._refresh(optimizer)
        return self._together()

    def before_step(self, optimizer: Any) -> None:
        """Read the settings of an optimizer that is about to step, if they may have changed."""
        if not any(optimizer is each for each in self._stepped):
            self._stepped.append(optimizer)
            self._known = None
        self._refresh(optimizer)

    def _refresh(self, optimizer: Any) -> None:
        key = id(optimizer)
        # An error of an optimizer's settings must not stop the training: its settings then stay unknown.
        with Tolerated():
            stamp = self._framework.optimizers.settings_stamp(optimizer)
            if key in self._stamps and self._stamps[key] == stamp:
                return
            self._stamps[key] = stamp
            self._known = None
            self._read[key] = {}
            self._read[key] = self._flat(key, self._framework.optimizers.settings(optimizer))

    def of_step(self, captured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a step that differ from those of the first recorded step.

        Args:
            captured: settings that the capture of the step has read.
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
        shown = tuple(family for family in _OF_CALLS if any(name.startswith(family) for name in plain))
        old = {n: v for n, v in self._calls.items() if n.startswith(_OF_CALLS) and not (shown and n.startswith(shown))}
        self._calls = old | {name: value for name, value in plain.items() if value is not None}

    def _together(self) -> dict[str, Any]:
        settings = dict(self._host)
        for number, optimizer in enumerate(self._acting()):
            read = self._read.get(id(optimizer), {})
            settings |= {f"optimizer.{number}.{name}": value for name, value in read.items()}
        return settings | self._calls

    def _acting(self) -> list[Any]:
        """Return the optimizers without those that have not stepped and whose parameters another one has stepped."""
        optimized = self._framework.optimizers.optimized
        with Tolerated():
            held = {id(parameter) for each in self._stepped for parameter in optimized(each)}
            return [
                each
                for each in self._optimizers
                if any(each is other for other in self._stepped) or not held.issuperset(map(id, optimized(each)))
            ]
        return list(self._optimizers)

    def optimizers(self) -> dict[str, Any]:
        """Return each optimizer, by the key of its settings."""
        return {f"optimizer.{key}": each for key, each in enumerate(self._acting())}

    def _flat(self, key: int, settings: OptimizerSettings) -> dict[str, Any]:
        sites = self._sites()
        flat: dict[str, Any] = {"rule": settings.rule}
        flat |= {name: plain_setting(value) for name, value in settings.others.items()}
        for number, group in enumerate(settings.groups):
            group_prefix = f"group.{number}"
            flat |= {f"{group_prefix}.{name}": plain_setting(value) for name, value in group.values.items()}
            if f"{group_prefix}.lr" in flat:
                # The first learning rate: that of each step is a record.
                flat[f"{group_prefix}.lr"] = self._rates.setdefault((key, number), flat[f"{group_prefix}.lr"])
            trained = [p for p in group.parameters if self._framework.tensors.trainable(p)]
            names = [sites.get(id(parameter)) for parameter in trained]
            flat[f"{group_prefix}.parameters"] = [name for name in names if name is not None]
            if None in names:
                flat[f"{group_prefix}.others"] = names.count(None)  # parameters of another model, or copies
        return {name: value for name, value in flat.items() if value is not None}

    def _sites(self) -> dict[int, str]:
        """Return the names of the parameters by identity, after the first path that reaches each."""
        names: dict[int, str] = {}
        for node in self._layers.nodes:
            for slot, tensor, role in self._framework.layers.parameters(node.layer):
                if role == "parameter":
                    names.setdefault(id(tensor), f"{node.path}/{slot}")
        return names
