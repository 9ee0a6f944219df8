"""The types that flow through every room: records, pairs, diffs, and their containers.

Numpy only. Everything here is frozen: a room makes new values, it does not edit the ones it was given.
"""

from padiff.records.compared import Coverage, Diff, Figures, FirstDiff, Pair, Report
from padiff.records.folded import FoldedDiffs
from padiff.records.recorded import (
    LOOP,
    PARAMETER_STAGES,
    ROOT,
    STAGES,
    InMemory,
    Layer,
    Parameter,
    Record,
    Run,
    RunInfo,
    Sketched,
    Step,
    TensorSource,
    inner_path,
    is_functional,
    make_sketches,
)

__all__ = [
    "Coverage",
    "Diff",
    "Figures",
    "FirstDiff",
    "FoldedDiffs",
    "InMemory",
    "LOOP",
    "Layer",
    "PARAMETER_STAGES",
    "Pair",
    "Parameter",
    "ROOT",
    "Record",
    "Report",
    "Run",
    "RunInfo",
    "STAGES",
    "Sketched",
    "Step",
    "TensorSource",
    "inner_path",
    "is_functional",
    "make_sketches",
]
