"""How much of two runs was compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of each run was compared.

    Attributes:
        compared: how many pairs the verdict counts (`Diff.counts`); "5 of 343 pairs differ" is of these 343.
        missing: how many of them fail because a side is missing.
        reference_records, candidate_records: all records of the compared steps.
        reference_layers, candidate_layers: unmatched layers that own parameters or have no sublayers, by path.
        reference_containers, candidate_containers: unmatched layers that only hold others: another nesting.
        reference_parts, candidate_parts: layers without a partner of their own whose parameters were compared as parts
            of another layer's (query, key and value in one): only their outputs were not.
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
        reference_unrecorded, candidate_unrecorded: parameters that train, that the lists let be recorded, and that no
            compared step has a record of, by ``layer/slot``.
        left_out: why something was not recorded, as the first compared steps note it, with the side in front.
        lost: which rank of which run did not write which steps, though others did, a sentence each.
        zeros: sites of gradients that are rounding noise around a true value of zero, which a fixed tolerance let pass.
    """

    compared: int = 0
    missing: int = 0
    reference_records: int = 0
    candidate_records: int = 0
    reference_layers: tuple[str, ...] = ()
    candidate_layers: tuple[str, ...] = ()
    reference_containers: tuple[str, ...] = ()
    candidate_containers: tuple[str, ...] = ()
    reference_parts: tuple[str, ...] = ()
    candidate_parts: tuple[str, ...] = ()
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
    reference_unrecorded: tuple[str, ...] = ()
    candidate_unrecorded: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def unrecorded(self) -> int:
        """How many parameters that train have no record, on either side."""
        return len(self.reference_unrecorded) + len(self.candidate_unrecorded)

    @property
    def share(self) -> float:
        """Paired records as a share of all that both runs should have recorded, 0 to 1.

        A parameter that trains and has no record counts as one record of each compared step.
        """
        total = self.reference_records + self.candidate_records + self.unrecorded * max(len(self.steps), 1)
        return 2 * (self.compared - self.missing) / total if total else 0.0

    @property
    def complete(self) -> bool:
        """Whether nothing was left out."""
        paired = self.compared - self.missing
        return self.reference_records == self.candidate_records == paired and not self.unrecorded
