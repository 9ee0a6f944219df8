"""Amount of two runs that was compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coverage:
    """Amount of each run that was compared, and names of everything that was not.

    Attributes:
        compared: number of pairs that the verdict counts (`Diff.counts`); "5 of 343 pairs differ" refers to these 343.
        missing: number of these pairs that fail because a side is missing.
        reference_records, candidate_records: number of records of the compared steps.
        reference_layers, candidate_layers: unmatched layers that own parameters or have no sublayers, by path.
        reference_containers, candidate_containers: unmatched layers that only hold other layers: the models nest
            differently.
        reference_parts, candidate_parts: layers without a partner whose parameters were compared as parts of another
            layer's (query, key and value in one matrix); only their outputs were not compared.
        reference_parameters, candidate_parameters: unmatched parameters and buffers, by ``layer/slot``.
        reference_sites, candidate_sites: unmatched records of matched layers, by site.
        uncalled: layers whose forward was never called, by path, prefixed with the side.
        steps: numbers of the compared steps.
        reference_steps, candidate_steps: steps that only this run has.
        notes: further sentences (settings that differ, calls that were not compared, ...).
        ambiguous: pairs for which another partner fits nearly as well, with that partner.
        assumed: assumptions about the storage of a tensor that neither names nor shapes prove.
        views: layers whose tensors have another layout, and the layout.
        cut_elsewhere: pairs of layers that end at different places of the computation: their contents are compared,
            their own outputs are not.
        sketched: number of pairs that were judged from sketches; their relative L2 error is an estimate.
        bounded: number of the sketched pairs that were judged from norms and means only, because one side has another
            layout.
        ranks: the compared quantities of runs with different numbers of processes, in words.
        amplified: the first step whose outputs differ by more than a tenth of themselves although no diff failed:
            rounding that the training amplified. `None` if there is none.
        unmeasured: sites of pairs that have sketches only, from which nothing can be computed: parts of a fused tensor.
        reference_unrecorded, candidate_unrecorded: trainable parameters that the lists include and that have no record
            in any compared step, by ``layer/slot``.
        left_out: reasons why something was not recorded, as noted by the first compared steps, prefixed with the side.
        lost: sentences that name a rank and the steps that other ranks wrote and this one did not.
        zeros: sites of gradients that are rounding noise around a true value of zero, and that a fixed tolerance
            accepted.
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
        """Return the number of trainable parameters without a record, on both sides together."""
        return len(self.reference_unrecorded) + len(self.candidate_unrecorded)

    @property
    def share(self) -> float:
        """Return the paired records as a share of all records that both runs should have, 0 to 1.

        A trainable parameter without a record counts as one record of each compared step.
        """
        total = self.reference_records + self.candidate_records + self.unrecorded * max(len(self.steps), 1)
        return 2 * (self.compared - self.missing) / total if total else 0.0

    @property
    def complete(self) -> bool:
        """Return True if every record of both runs was paired and every trainable parameter has a record."""
        paired = self.compared - self.missing
        return self.reference_records == self.candidate_records == paired and not self.unrecorded
