"""Knowledge from earlier steps that makes recording the next step faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from padiff.model.nested import slots_of
from padiff.records.step_schema import Site, StepSchema

# Key of an output site: path, class of the layer, slot, number of the call, True for training mode.
_About = tuple[str, str, str, int, bool]

# Largest number of sites that are remembered.
_MOST_SITES = 200_000


class OutputSite:
    """The site at which one output of a layer and its gradient are recorded.

    Attributes:
        path, kind, slot, call, training: the attributes of `padiff.records.step_schema.Site`.
        alone: a tuple that holds only this site.
        forward, backward: the sites of the last recorded samples of the output and its gradient, which usually are
            those of the next step, too.
    """

    __slots__ = ("alone", "backward", "call", "forward", "kind", "path", "slot", "training")

    def __init__(self, path: str, kind: str, slot: str, call: int, training: bool) -> None:
        self.path, self.kind, self.slot, self.call, self.training = path, kind, slot, call, training
        self.alone: tuple[OutputSite, ...] = (self,)
        self.forward: Site | None = None
        self.backward: Site | None = None


@dataclass(slots=True)
class StepCache:
    """Cache of facts from earlier steps of a recording.

    Attributes:
        pattern: pattern of the last step, with the parts of its trace.
        steady: True if the last step had the same pattern as the step before, or was the first one.
        plan: the expected events of the next step, or None if unknown.
        sites: all recorded sites, so that equal sites are one object.
    """

    pattern: tuple[StepSchema, Sequence[object]] | None = None
    steady: bool = True
    plan: Any = None
    sites: dict[Site, Site] = field(default_factory=dict)
    #: Paths of the layers whose code chooses (`padiff.recorder.choosing`), as traced steps showed.
    choosing: set[str] = field(default_factory=set)
    #: Function and number of the loop's calls that choose for the loss.
    loop_choices: set[tuple[str, int]] = field(default_factory=set)
    #: Sites of the inputs that the training computes (`padiff.recorder.computed_inputs`), as steps showed.
    computed_inputs: set[str] = field(default_factory=set)
    #: All output sites, so that equal ones are one object.
    _outputs: dict[_About, OutputSite] = field(default_factory=dict)
    #: Name of the first argument, by forward function.
    _slots: dict[Any, str] = field(default_factory=dict)

    def first_slot(self, forward: Any) -> str:
        """Return the slot of the first positional argument of a layer's ``forward``."""
        function = getattr(forward, "__func__", None)
        slot = self._slots.get(function)
        if slot is None:
            slot = next(iter(slots_of(forward, 1)))
            if function is not None:  # without ``__func__``, ``forward`` is set on the object itself
                self._slots[function] = slot
        return slot

    def site(self, site: Site) -> Site:
        """Return the cached object that equals a site; a new site is added."""
        canonical = self.sites.get(site)
        if canonical is None:
            if len(self.sites) >= _MOST_SITES:  # sequences whose length changes in each step
                self.sites.clear()
            canonical = self.sites[site] = site
        return canonical

    def output(self, path: str, kind: str, slot: str, call: int, training: bool) -> OutputSite:
        """Return the cached site of an output; a new site is added."""
        about = path, kind, slot, call, training
        output_site = self._outputs.get(about)
        if output_site is None:
            if len(self._outputs) >= _MOST_SITES:
                self._outputs.clear()
            output_site = self._outputs[about] = OutputSite(*about)
        return output_site
