"""Values that pass between all packages: records, pairs, diffs, and their containers.

This package needs numpy only. All values are frozen: code creates new values instead of editing those it receives.
"""

from padiff.records.aftermath import Aftermath, Standing, mark_of
from padiff.records.both import SIDES, Both, unzipped
from padiff.records.cards import report_card, run_card
from padiff.records.cause import Cause
from padiff.records.compact_diffs import CompactDiffs
from padiff.records.compared import UNSCALED, Diff, Figures, Float64Reference, Pair, figures_text
from padiff.records.coverage import Coverage
from padiff.records.coverage_text import coverage_lines, zeros_text
from padiff.records.declared import Difference
from padiff.records.extent import Extent, TensorExtent
from padiff.records.first_diff import FirstDiff
from padiff.records.judgement import Figure, Grade, Judgement, Kind, Problem, Rule
from padiff.records.layout import BROADCAST, RESHAPED, SAME, TRANSPOSED, Layout
from padiff.records.models import Models, Partners
from padiff.records.parameter_states import OptimizerState, ParameterState, Rate
from padiff.records.picture import Element, Picture
from padiff.records.recomputed import Recomputed
from padiff.records.recorded import (
    LOOP,
    PARAMETER_STAGES,
    ROOT,
    STAGES,
    Evaluation,
    Layer,
    Parameter,
    Record,
    Run,
    RunInfo,
    Step,
    inner_path,
    is_below,
    is_functional,
    is_loss,
    is_of_loss,
    loss_role,
)
from padiff.records.report import Report
from padiff.records.report_data import CANNOT_TELL, DIFFER, MATCH
from padiff.records.report_text import (
    AMPLIFIED,
    count_text,
    failed_lines,
    failed_rows,
    floor_lines,
    limit_lines,
    stage_table,
    third_lines,
    verdict,
    where_lines,
)
from padiff.records.run_text import (
    bytes_text,
    declared_lines,
    model_text,
    owned_text,
    run_line,
    run_text,
    settings_text,
    step_text,
    steps_text,
)
from padiff.records.settings import setting_text, settings_at, settings_delta, settings_from_json
from padiff.records.sources import InMemory, OutputBuffer, Sketched, Storable, StreamedArray, TensorSource
from padiff.records.step_schema import LazyRecords, arrays_of, make_sketches, sources_of
from padiff.records.traces import NO_TRACE, Choice, Operand, Trace, TracedCall, TracedTensor
from padiff.system.printable import printable

__all__ = [
    "Choice",
    "OptimizerState",
    "ParameterState",
    "Rate",
    "Cause",
    "Extent",
    "TensorExtent",
    "UNSCALED",
    "Layout",
    "TRANSPOSED",
    "SAME",
    "RESHAPED",
    "BROADCAST",
    "OutputBuffer",
    "Storable",
    "StreamedArray",
    "Rule",
    "Problem",
    "Kind",
    "Judgement",
    "Figure",
    "AMPLIFIED",
    "Aftermath",
    "Both",
    "CANNOT_TELL",
    "Coverage",
    "DIFFER",
    "Diff",
    "Difference",
    "Figures",
    "Grade",
    "FirstDiff",
    "CompactDiffs",
    "InMemory",
    "LOOP",
    "Layer",
    "MATCH",
    "NO_TRACE",
    "Operand",
    "PARAMETER_STAGES",
    "Element",
    "Evaluation",
    "Models",
    "Pair",
    "Partners",
    "Picture",
    "Parameter",
    "ROOT",
    "Recomputed",
    "Record",
    "Report",
    "Run",
    "RunInfo",
    "SIDES",
    "STAGES",
    "Sketched",
    "Standing",
    "Step",
    "TensorSource",
    "Float64Reference",
    "Trace",
    "TracedCall",
    "TracedTensor",
    "bytes_text",
    "count_text",
    "coverage_lines",
    "declared_lines",
    "failed_lines",
    "failed_rows",
    "figures_text",
    "inner_path",
    "is_below",
    "is_functional",
    "is_loss",
    "is_of_loss",
    "loss_role",
    "LazyRecords",
    "arrays_of",
    "make_sketches",
    "sources_of",
    "mark_of",
    "model_text",
    "owned_text",
    "printable",
    "report_card",
    "run_card",
    "run_line",
    "run_text",
    "setting_text",
    "settings_at",
    "settings_delta",
    "settings_from_json",
    "settings_text",
    "floor_lines",
    "limit_lines",
    "third_lines",
    "stage_table",
    "step_text",
    "steps_text",
    "unzipped",
    "verdict",
    "where_lines",
    "zeros_text",
]
