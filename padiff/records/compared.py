"""What a comparison makes of it: pairs, diffs, the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from padiff.records.recorded import Record


@dataclass(frozen=True, slots=True)
class Pair:
    """Two records that stand for the same quantity; one side may be missing.

    Attributes:
        step: the step's number.
        reference, candidate: the records, `None` where that side has none.
        transform: how the candidate's values are brought into the reference's layout: empty, or a view
            as `padiff.align.views` writes it (``transpose``, ``axes 0,3,1,2``, ``reshape``).
        scales: what each side's values are divided by before comparing (loss scaling).
        optional: whether it is no diff that a side is missing: a buffer that only one model keeps.
    """

    step: int
    reference: Record | None
    candidate: Record | None
    transform: str = ""
    scales: tuple[float, float] = (1.0, 1.0)
    optional: bool = False

    @property
    def anchor(self) -> Record:
        """The record that names the pair: the reference's, or the candidate's where it stands alone."""
        record = self.reference if self.reference is not None else self.candidate
        assert record is not None, "a pair has at least one side"
        return record

    @property
    def stage(self) -> str:
        return self.anchor.stage

    @property
    def complete(self) -> bool:
        return self.reference is not None and self.candidate is not None


@dataclass(frozen=True, slots=True)
class Figures:
    """How far two tensors are apart, computed in float64 over positions where both are finite.

    Attributes:
        max_abs: largest ``|c - r|``.
        max_rel: largest ``|c - r| / |r|`` over ``r != 0``.
        mean_abs: mean of ``|c - r|``.
        mean_reference: mean of ``|r|``.
        l2: ``||c - r||``.
        reference_l2, candidate_l2: ``||r||`` and ``||c||``.
        bulk_l2: ``||c - r||`` without its few largest elements (`measure` says how many); `None` if not looked at.
        size: number of elements.
        index: where ``max_abs`` is.
        values: reference's and candidate's value there.
        beyond: how many elements are beyond an elementwise tolerance (0 if none was asked for).
        nonfinite: how many positions are NaN or infinite on one side only, or unequally.
        overflowed: how many positions are NaN or infinite on both sides, alike or not.
        basis: what was measured: ``tensors``, ``sketches`` (L2 norms are estimates, ``max_abs``, ``max_rel`` and
            ``beyond`` lower bounds, ``mean_abs`` the root of the mean square), or ``moments`` (lower bounds).
        spread: relative standard deviation of ``l2``, where it is an estimate.
    """

    max_abs: float = 0.0
    max_rel: float = 0.0
    mean_abs: float = 0.0
    mean_reference: float = 0.0
    l2: float = 0.0
    reference_l2: float = 0.0
    candidate_l2: float = 0.0
    size: int = 0
    index: tuple[int, ...] = ()
    values: tuple[float, float] = (0.0, 0.0)
    beyond: int = 0
    nonfinite: int = 0
    overflowed: int = 0
    bulk_l2: float | None = None
    basis: str = "tensors"
    spread: float = 0.0

    @property
    def rel_l2(self) -> float:
        """``||c - r|| / ||r||``; against a reference of zeros 0 or infinity."""
        if self.reference_l2 > 0:
            return self.l2 / self.reference_l2
        return 0.0 if self.l2 == 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Diff:
    """A pair, measured and judged.

    Attributes:
        pair: what was compared.
        figures: how far apart; `None` where nothing could be measured (see ``problem``).
        passed: whether the tolerance policy accepts it.
        limit: what the judged figure was allowed to be.
        judged: which figure was judged, and its value: ``("rel_l2", 3e-7)``.
        problem: why the values could not be compared or are wrong whatever the tolerance
            (``missing on the candidate``, ``shapes differ: ...``), else empty.
        floor: rounding noise of the site, where a policy knows it.
    """

    pair: Pair
    figures: Figures | None = None
    passed: bool = True
    limit: float | None = None
    judged: tuple[str, float] = ("", 0.0)
    problem: str = ""
    floor: float | None = None

    @property
    def compared(self) -> bool:
        """Whether both sides were there, and could be measured."""
        return self.pair.complete and (self.figures is not None or not self.passed)

    @property
    def excess(self) -> float:
        """Judged figure as a multiple of its limit; infinite where a problem or a limit of 0 stands."""
        name, figure = self.judged
        if not name:
            return 0.0 if self.passed else float("inf")
        if not self.limit:
            return 0.0 if figure == 0 else float("inf")
        return figure / self.limit


@dataclass(frozen=True, slots=True)
class FirstDiff:
    """Where two runs part, first in causal order: step, stage, execution order of the reference."""

    step: int
    stage: str
    reference: str | None
    candidate: str | None
    slot: str
    max_abs: float
    max_rel: float
    message: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of each run was compared.

    Attributes:
        compared: records of the reference that were paired, of ``reference_records``.
        reference_records, candidate_records: all records of the compared steps.
        reference_layers, candidate_layers: unmatched layers that own parameters or have no sublayers, by path.
        reference_containers, candidate_containers: unmatched layers that only hold others: another nesting.
        reference_parameters, candidate_parameters: unmatched parameters and buffers, by ``layer/slot``.
        reference_sites, candidate_sites: unmatched records of matched layers, by site.
        uncalled: layers whose forward was never called, by path with the side in front.
        steps: numbers of the compared steps.
        reference_steps, candidate_steps: steps that only one run has.
        notes: further sentences (settings that differ, calls that were left out, ...).
        ambiguous: pairs that another partner would fit nearly as well, with it.
        assumed: how something is stored that neither names nor shapes tell.
        views: layers whose tensors lie in another layout, and which.
        cut_elsewhere: pairs of layers that end at other places of the computation: what is inside of them is compared,
            their own outputs are not.
        sketched: how many of the pairs were judged from sketches, whose relative L2 error is an estimate.
        bounded: how many of those from norms and means only: one side lies in another layout.
        ranks: what is compared where the runs have different numbers of processes, in words.
        amplified: the first step whose outputs are more than a tenth of themselves apart, though nothing has parted:
            rounding that the training amplified. `None` if there is none.
        unmeasured: sites of pairs of which sketches are all there is, and say nothing: parts of a fused tensor.
    """

    compared: int = 0
    reference_records: int = 0
    candidate_records: int = 0
    reference_layers: tuple[str, ...] = ()
    candidate_layers: tuple[str, ...] = ()
    reference_containers: tuple[str, ...] = ()
    candidate_containers: tuple[str, ...] = ()
    reference_parameters: tuple[str, ...] = ()
    candidate_parameters: tuple[str, ...] = ()
    reference_sites: tuple[str, ...] = ()
    candidate_sites: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    reference_steps: tuple[int, ...] = ()
    candidate_steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    ambiguous: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    views: tuple[str, ...] = ()
    cut_elsewhere: tuple[str, ...] = ()
    sketched: int = 0
    bounded: int = 0
    unmeasured: tuple[str, ...] = ()
    ranks: str = ""
    amplified: int | None = None

    @property
    def share(self) -> float:
        """Paired records as a share of all records of both runs, 0 to 1."""
        total = self.reference_records + self.candidate_records
        return 2 * self.compared / total if total else 0.0

    @property
    def complete(self) -> bool:
        """Whether nothing that was recorded was left out."""
        return self.reference_records == self.candidate_records == self.compared


@dataclass(frozen=True, eq=False)
class Report:
    """All diffs of two steps or two runs, in causal order. True in a condition if nothing parted.

    Attributes:
        diffs: every diff, the ones that passed and the pairs with a missing side too. Of a long comparison they are
            made anew as they are asked for (`padiff.records.FoldedDiffs`).
        first_diff: the first one that did not pass, in words, or `None`.
        coverage: how much of each run was compared.
        tolerance: the tolerance policy, in words.
        reference, candidate: names of the two runs.
        environment: what differs around the two trainings (threads, TF32, versions), the most telling first.
    """

    diffs: Sequence[Diff]
    coverage: Coverage
    first_diff: FirstDiff | None = None
    tolerance: str = ""
    reference: str = "reference"
    candidate: str = "candidate"
    environment: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.first_diff is None

    @cached_property
    def failed(self) -> Sequence[Diff]:
        """The diffs that did not pass, in causal order."""
        folded: Sequence[Diff] | None = getattr(self.diffs, "failed", None)
        return tuple(diff for diff in self.diffs if not diff.passed) if folded is None else folded

    @cached_property
    def worst(self) -> Diff | None:
        """The compared diff with the largest relative L2 error, or `None` where nothing has figures.

        What is rounding noise throughout (its limit is above 1) is passed over while there is anything else.
        """
        worst: list[Diff | None] = [None, None]
        largest = [-1.0, -1.0]
        for diff in self.diffs:
            if diff.figures is None or not diff.compared:
                continue
            error = diff.figures.rel_l2
            noise = diff.passed and diff.limit is not None and diff.limit > 1
            if largest[noise] < error < math.inf:
                worst[noise], largest[noise] = diff, error
        return worst[0] or worst[1]

    def __bool__(self) -> bool:
        return self.passed

    def __eq__(self, other: object) -> bool:
        # People write `if result == False:` after a check.
        return self.passed is other if isinstance(other, bool) else self is other

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[Diff]:
        return iter(self.diffs)
