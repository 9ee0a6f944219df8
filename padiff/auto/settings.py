"""A call of ``auto_diff``, understood: the two sides and the options that hold."""

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
    """One of the two models, with all that belongs to it."""

    name: str
    live: LiveModel
    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Any] | None
    optimizer: Any
    #: Layers of the layer map, by path: what is below them is not compared one by one.
    mapped: tuple[str, ...] = ()

    @property
    def framework(self) -> Any:
        return self.live.framework

    @property
    def chosen(self) -> frozenset[str]:
        """Paths of the layers to record: all, or what the lists of a proxy and the layer map leave."""
        chosen: frozenset[str] = self.model.padiff_chosen if is_proxy(self.model) else self._all
        return select(self.live.nodes, hidden=self.mapped) & chosen

    @property
    def owning(self) -> frozenset[str]:
        """Paths of the layers whose parameters to record."""
        listed: frozenset[str] = self.model.padiff_owning if is_proxy(self.model) else self._all
        return owning(
            self.live.nodes, self.framework, select(self.live.nodes, hidden=self.mapped) & listed, self.mapped
        )

    @property
    def _all(self) -> frozenset[str]:
        return frozenset(node.path for node in self.live.nodes)


@dataclass
class Settings:
    """A call of ``auto_diff``, understood."""

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
    #: Whether the call was in the first generation's words.
    first_generation: bool = False
    #: Pairs of layers, by path, that a rule of the user's carries over as wholes; those of them that no map pairs.
    ruled: tuple[tuple[str, str], ...] = ()
    ruled_besides: tuple[tuple[str, str], ...] = ()

    @property
    def mapped(self) -> list[tuple[str, str]]:
        """Pairs of layers that are compared by what they give, not layer by layer inside of them."""
        return list(zip(self.sides.reference.mapped, self.sides.candidate.mapped))

    def whole_map(self) -> GivenMap:
        """The layer map; the two models answer to each other as wholes, so their outputs are compared in any case."""
        pairs = [*self.layer_map, *self.ruled_besides]
        return GivenMap(pairs if any(ROOT in pair for pair in pairs) else [(ROOT, ROOT), *pairs])

    def options(self) -> dict[str, Any]:
        """The options as they hold, for the log."""
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
