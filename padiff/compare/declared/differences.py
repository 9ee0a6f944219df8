"""Collection of all declared differences of two runs, step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from padiff.align import Alignment
from padiff.compare.declared.layers import layer_differences, mode_differences
from padiff.compare.declared.manual_weight_decay import manual_weight_decay, rate_of, without_manual_weight_decay
from padiff.compare.declared.optimizers import (
    GroupPair,
    Optimizers,
    group_pairs,
    optimizer_differences,
    rate_differences,
    rates_agree,
    site_pairs,
)
from padiff.compare.declared.precision import precision_differences
from padiff.compare.declared.run import (
    ARGUMENT,
    Doubtful,
    argument_differences,
    clip_differences,
    doubtful_sites,
    loop_differences,
    loss_differences,
    micro_batch_differences,
    model_differences,
    tied_differences,
    trained_differences,
)
from padiff.records import Both, Difference, RunInfo, Step, settings_at
from padiff.records.step_diffs import StepDiffs


class Declared:
    """Declared differences of two runs in the compared steps."""

    def __init__(self) -> None:
        self._key: Any = None
        self._lasting: tuple[Difference, ...] = ()
        self._groups: list[GroupPair] = []
        self._optimizers: Both[Optimizers] = Both(Optimizers(), Optimizers())
        self._doubtful: Doubtful = []
        self._first: dict[Any, Difference] = {}
        self._of_step: dict[int, tuple[Difference, ...]] = {}
        self._made_up: dict[Any, int] = {}
        self._rates: dict[int, float] = {}
        #: True for each side that made calls in evaluation mode in the step before.
        self._evaluated = Both(False, False)

    @property
    def all(self) -> tuple[Difference, ...]:
        """All differences, each with the first step that shows it, in causal order."""
        return tuple(sorted(self._first.values(), key=lambda difference: difference.order))

    def at(self, step: int) -> tuple[Difference, ...]:
        """Return the differences in a compared step."""
        differences = self._of_step.get(step, ())
        return without_manual_weight_decay(differences, self._made_up) if self._made_up else differences

    def in_steps(self, steps: Iterable[int], concerns: Callable[[Difference], bool]) -> list[tuple[int, Difference]]:
        """Return the differences in these steps that pass the filter, each with the first step that shows it."""
        first_by_key: dict[Any, tuple[int, Difference]] = {}
        looked: set[int] = set()
        for number in steps:
            differences = self.at(number)
            if id(differences) not in looked:  # most steps share one tuple
                looked.add(id(differences))
                for difference in differences:
                    first_by_key.setdefault(difference.key, (number, difference))
        return [(number, difference) for number, difference in first_by_key.values() if concerns(difference)]

    def hold_against(self, ranks: Sequence[StepDiffs]) -> None:
        """Check against the tensors of a step, of each rank, if differences in weight decay are compensated by hand."""
        rate, number = rate_of(ranks), next((diffs.number for diffs in ranks if diffs), None)
        if rate is not None and number is not None:
            self._rates[number] = rate
        unresolved = [
            difference for difference in self._lasting if difference.changes and difference.key not in self._made_up
        ]
        diffs = [diff for rank in ranks for diff in rank] if unresolved else []
        for difference in unresolved:
            if number is not None and manual_weight_decay(difference, diffs, self._rates):
                self._made_up[difference.key] = number

    def rates_agree(self, steps: Both[Step]) -> bool:
        """Return True if all parameters have the same learning rate in both runs in a compared step, whatever
        their group.
        """
        return rates_agree(self._groups, self._optimizers, steps)

    def add_step(
        self,
        infos: Both[RunInfo],
        steps: Both[Step],
        alignment: Alignment,
        called: Both[Collection[str]],
    ) -> None:
        """Add the declared differences of a step.

        Args:
            called: paths of the layers that each run was seen to call.
        """
        number, frameworks = steps.reference.number, infos.map(lambda info: info.framework)
        # Most steps have the same settings as the step before, but for numbers that the model is called with.
        sides = infos.zip(steps).map(lambda side: (_lasting(side[0].settings), _lasting(side[1].settings)))
        key = id(alignment), *sides, *map(len, called)
        if key != self._key:
            self._key = key
            settings = infos.zip(steps).map(lambda side: settings_at(side[0].settings, side[1].settings))
            self._take(settings, infos, alignment, called, steps)
            self._lasting = self._dated(self._lasting, number)
        of_step = [
            *map(self._explained, rate_differences(self._groups, self._optimizers, steps, frameworks)),
            *trained_differences(self._doubtful, steps),
            *micro_batch_differences(steps),
            *model_differences(steps, alignment),
            *argument_differences(infos.zip(steps).map(lambda side: _arguments(side[0].settings, side[1].settings))),
        ]
        self._evaluated = steps.map(lambda step: bool(step.evaluations))
        # Equal steps share one tuple, because there may be many.
        self._of_step[number] = (*self._lasting, *self._dated(of_step, number)) if of_step else self._lasting

    def _explained(self, rate: Difference) -> Difference:
        """Return a difference in learning rates, extended by the trainer settings that cause it."""
        made_by = [
            difference
            for difference in self._lasting
            if difference.kind == "trainer" and difference.stage == rate.stage
        ]
        texts = [f"{difference.text_alone}: {difference.note}" for difference in made_by]
        return replace(rate, note="; ".join([rate.note, *texts] if rate.note else texts)) if texts else rate

    def _dated(self, differences: Iterable[Difference], number: int) -> tuple[Difference, ...]:
        dated = []
        for difference in differences:
            first = self._first.get(difference.key)
            if first is None or (difference.changes and not first.changes):  # a layer that was not called before
                self._first[difference.key] = first = replace(difference, step=number)
            dated.append(first)
        return tuple(dated)

    def _since(self, modes: Iterable[Difference], steps: Both[Step]) -> Iterator[Difference]:
        """Yield differences of modes, with the step from which on they exist if the modes agreed before."""
        for difference in modes:
            if not self._of_step:
                yield difference
                continue
            side = "candidate" if difference.values.candidate == "eval" else "reference"
            note = f"from step {steps.reference.number} on the {side} is in evaluation mode"
            if getattr(self._evaluated, side) or getattr(steps, side).evaluations:
                note += ", not switched back after the validation that ended before it"
            yield replace(difference, note=note)

    def _take(
        self,
        settings: Both[Mapping[str, Any]],
        infos: Both[RunInfo],
        alignment: Alignment,
        called: Both[Collection[str]],
        steps: Both[Step],
    ) -> None:
        frameworks = infos.map(lambda info: info.framework)
        self._optimizers = settings.map(Optimizers.from_settings)
        sites = site_pairs(alignment, infos)
        self._groups = group_pairs(self._optimizers, sites)
        self._doubtful = doubtful_sites(sites, infos, self._optimizers)
        self._lasting = (
            *layer_differences(alignment, settings, called, frameworks.candidate),
            *self._since(mode_differences(alignment, settings, called), steps),
            *precision_differences(alignment, steps),
            *loop_differences(settings),
            *loss_differences(settings, frameworks.candidate),
            *clip_differences(settings, self._optimizers, frameworks.candidate),
            *tied_differences(alignment, infos),
            *optimizer_differences(self._groups, frameworks),
        )


def _lasting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that usually hold for many steps."""
    return {name: value for name, value in settings.items() if not name.startswith(ARGUMENT)}


def _arguments(run: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a step that are numbers which the model is called with."""
    named = [{name: value for name, value in side.items() if name.startswith(ARGUMENT)} for side in (run, step)]
    return settings_at(*named) if any(named) else {}


def at_the_start(infos: Both[RunInfo], alignment: Alignment) -> tuple[Difference, ...]:
    """Return the declared differences known before any step, which hold for all trained parameters under every
    alignment.
    """
    frameworks, settings = infos.map(lambda info: info.framework), infos.map(lambda info: info.settings)
    optimizers = settings.map(Optimizers.from_settings)
    groups = group_pairs(optimizers, site_pairs(alignment, infos))
    declared = [
        *clip_differences(settings, optimizers, frameworks.candidate),
        *optimizer_differences(groups, frameworks),
    ]
    return tuple(difference for difference in declared if difference.changes and not difference.parameters.reference)
