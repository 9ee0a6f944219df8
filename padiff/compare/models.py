"""Both layer trees and their alignment, as a report holds them."""

from __future__ import annotations

from padiff.align import Alignment
from padiff.records import Both, Models, Partners, RunInfo


def models_of(infos: Both[RunInfo], alignment: Alignment) -> Models:
    """Both trees, and a pair for each two layers that answer to each other."""
    partners = [
        Partners(pair.reference.path, pair.candidate.path, pair.reason, pair.confidence) for pair in alignment.pairs
    ]
    partners += [
        Partners(reference.path, candidate.path, split.reason, split.confidence)
        for split in alignment.splits
        for reference in split.reference
        for candidate in split.candidate
    ]
    return Models(
        layers=infos.map(lambda info: info.layers),
        frameworks=infos.map(lambda info: f"{info.framework} {info.framework_version}".strip()),
        partners=tuple(partners),
    )
