"""Settings of an ``auto_diff``: the two models and the options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from padiff.compare import Tolerance
from padiff.model.given_map import GivenMap
from padiff.model.live_model import LiveModel, is_proxy
from padiff.model.selection import select
from padiff.model.tree import owning
from padiff.records import ROOT, Both


@dataclass
class ModelSetup:
    """One of the two models with its inputs, loss function and optimizer."""

    name: str
    live: LiveModel
    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Any] | None
    optimizer: Any
    #: Paths of the mapped layers; layers below these are not compared.
    mapped: tuple[str, ...] = ()

    @property
    def framework(self) -> Any:
        return self.live.framework

    @property
    def chosen(self) -> frozenset[str]:
        """Return the paths of the layers to record: all, restricted by the proxy's lists and the layer map."""
        chosen: frozenset[str] = self.model.padiff_chosen if is_proxy(self.model) else self._all
        return select(self.live.nodes, hidden=self.mapped) & chosen

    @property
    def owning(self) -> frozenset[str]:
        """Return the paths of the layers whose parameters to record."""
        listed: frozenset[str] = self.model.padiff_owning if is_proxy(self.model) else self._all
        return owning(
            self.live.nodes, self.framework, select(self.live.nodes, hidden=self.mapped) & listed, self.mapped
        )

    @property
    def _all(self) -> frozenset[str]:
        return frozenset(node.path for node in self.live.nodes)


@dataclass
class Settings:
    """All settings of a call of ``auto_diff``."""

    sides: Both[ModelSetup]
    tolerance: Tolerance
    auto_init: bool
    diff_phase: str
    single_step: bool
    steps: int
    layer_map: GivenMap
    same_dropout: bool = False
    full_stacks: bool = False
    remarks: tuple[str, ...] = ()
    #: True if the call has the first generation's form.
    first_generation: bool = False
    #: Pairs of layers, by path, with a rule of the user; and the subset of these pairs that is not in the layer map.
    ruled: tuple[tuple[str, str], ...] = ()
    ruled_besides: tuple[tuple[str, str], ...] = ()

    @property
    def mapped(self) -> list[tuple[str, str]]:
        """Return the pairs of layers that are compared by their outputs, without the layers below."""
        return list(zip(self.sides.reference.mapped, self.sides.candidate.mapped))

    def whole_map(self) -> GivenMap:
        """Return the layer map with the pair of root layers added, so that the models' outputs are always compared."""
        pairs = [*self.layer_map, *self.ruled_besides]
        return GivenMap(pairs if any(ROOT in pair for pair in pairs) else [(ROOT, ROOT), *pairs])

    def options(self) -> dict[str, Any]:
        """Return the effective options for the log."""
        return {
            "auto_init": self.auto_init,
            "atol": self.tolerance.atol,
            "rtol": self.tolerance.rtol,
            "diff_phase": self.diff_phase,
            "compare_mode": self.tolerance.mode,
            "single_step": self.single_step,
            "steps": self.steps,
            "use_loss": self.sides.reference.loss_fn is not None,
            "use_opt": self.sides.reference.optimizer is not None,
        }
