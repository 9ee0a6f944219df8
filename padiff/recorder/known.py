"""What is known from the steps before of what a step will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from padiff.model.nested import slots_of
from padiff.records.alike import Pattern, Site

# Sites that are kept in mind.
_MOST_SITES = 200_000


@dataclass(slots=True)
class Known:
    """What is known from the steps before of what a step will be.

    Attributes:
        pattern: the last step's, with what its trace was made of.
        sites: every site that was recorded: one that is met again is the same object.
    """

    pattern: tuple[Pattern, Sequence[object]] | None = None
    sites: dict[Site, Site] = field(default_factory=dict)
    #: Likewise of gradients.
    gradients: dict[Any, Any] = field(default_factory=dict)
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
                self.gradients.clear()
            found = self.sites[site] = site
        return found
