"""What is known from the steps before of what a step will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from padiff.model.nested import slots_of
from padiff.records.alike import Pattern, Site

# Where one output of a layer is: the path, the layer's class, the slot, the number of the call, whether in training.
_About = tuple[str, str, str, int, bool]

# Sites that are kept in mind.
_MOST_SITES = 200_000


class OutputSite:
    """Where one output of a layer, and its gradient, are recorded.

    Attributes:
        path, kind, slot, call, training: of the layer's call, as `padiff.records.alike.Site` has them.
        alone: a tuple of nothing else.
        forward, backward: what the last sample of each was recorded as; that of the next step is the same, as a rule.
    """

    __slots__ = ("alone", "backward", "call", "forward", "kind", "path", "slot", "training")

    def __init__(self, path: str, kind: str, slot: str, call: int, training: bool) -> None:
        self.path, self.kind, self.slot, self.call, self.training = path, kind, slot, call, training
        self.alone: tuple[OutputSite, ...] = (self,)
        self.forward: Site | None = None
        self.backward: Site | None = None


@dataclass(slots=True)
class Known:
    """What is known from the steps before of what a step will be.

    Attributes:
        pattern: the last step's, with what its trace was made of.
        steady: whether the last step was like the one before, as far as there was one.
        plan: what the next step is expected to do; `None`: that is not known.
        sites: every site that was recorded: one that is met again is the same object.
    """

    pattern: tuple[Pattern, Sequence[object]] | None = None
    steady: bool = True
    plan: Any = None
    sites: dict[Site, Site] = field(default_factory=dict)
    #: Likewise of outputs.
    _outputs: dict[_About, OutputSite] = field(default_factory=dict)
    #: By the function: what a layer's first argument is called.
    _slots: dict[Any, str] = field(default_factory=dict)

    def first_slot(self, forward: Any) -> str:
        """The slot of the first argument that a layer is called with, by position."""
        function = getattr(forward, "__func__", None)
        slot = self._slots.get(function)
        if slot is None:
            slot = next(iter(slots_of(forward, 1)))
            if function is not None:  # else it is set on the object itself
                self._slots[function] = slot
        return slot

    def site(self, site: Site) -> Site:
        """The one object for a site."""
        found = self.sites.get(site)
        if found is None:
            if len(self.sites) >= _MOST_SITES:  # sequences of ever other lengths
                self.sites.clear()
            found = self.sites[site] = site
        return found

    def output(self, path: str, kind: str, slot: str, call: int, training: bool) -> OutputSite:
        """The one object for where an output is."""
        about = path, kind, slot, call, training
        found = self._outputs.get(about)
        if found is None:
            if len(self._outputs) >= _MOST_SITES:
                self._outputs.clear()
            found = self._outputs[about] = OutputSite(*about)
        return found
