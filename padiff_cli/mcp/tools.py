"""The tools: compare, explain, tensor, what_if, next_experiment. They read the run folders that they were given."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from padiff.compare import RunComparison, compare_runs
from padiff.compare.diagnose.hypotheses.engine import Explanation, explanations
from padiff.dump import open_run
from padiff.dump.store import is_remote
from padiff.errors import UsageError
from padiff.records import LOOP, Both, Diff, Record, Report, figures_text
from padiff.records.diagnostic import Diagnostic, diagnostic_json, diagnostic_of, diagnostic_schema, position_text
from padiff.records.first_diff import FirstDiff, Standing
from padiff.records.report_data import CANNOT_TELL, MATCH
from padiff.report_formats import json_parts
from padiff.system.terminal import printable
from padiff_cli.mcp import answers
from padiff_cli.mcp.edits import answering, schedule_of

# Number of comparisons that are kept, of files with the rest, of values in an answer and in such a file.
_KEPT, _FILES, _SHOWN, _MOST = 4, 100, 64, 65_536
# Code that is more than a name, a number or an argument's value.
_CODE = re.compile(r"\w\(.*\)|[-+*/]")
_AXIS = re.compile(r"(-?\d{1,12})?(?:(:)(-?\d{1,12})?(?::(\d{1,12}))?)?")


class Tool(NamedTuple):
    """A tool: its method, what it does, and the schemas of its arguments and its answer."""

    method: str
    description: str
    arguments: type
    output: dict[str, Any]


TOOLS = {
    "compare": Tool(
        "compare",
        "Compare two recorded trainings. Returns the first place where they differ, the cause, the lines of code of "
        "both sides and the fix. Call it first; call it again after each new recording.",
        answers.Pair,
        diagnostic_schema(),
    ),
    "explain": Tool(
        "explain",
        "All compared tensors of one layer in one step, in causal order, with their errors and limits.",
        answers.Place,
        answers.schema_of(answers.Explained),
    ),
    "tensor": Tool(
        "tensor",
        "Values of a layer's recorded tensors in one run: shape, minimum, maximum, mean, norm, and a slice.",
        answers.Slice,
        answers.schema_of(answers.Tensors),
    ),
    "what_if": Tool(
        "what_if",
        "The share of the first difference that an edit of the candidate explains, computed with the recorded tensors, "
        "without running anything: 'eps=1e-5', 'residual', 'mean instead of sum'. Read `text`: it says which side has "
        "what.",
        answers.Edit,
        answers.schema_of(answers.WhatIf),
    ),
    "next_experiment": Tool(
        "next_experiment",
        "What to run next with two runs, why, and what its result decides.",
        answers.Pair,
        answers.schema_of(answers.Experiment),
    ),
}


class _Compared:
    """A comparison of two runs, with the edits that explain its first diff once somebody asks.

    Args:
        paths: the runs.
    """

    def __init__(self, paths: Both[str]) -> None:
        self.paths = paths
        # In this process: output of other processes would be part of the protocol.
        self.report: Report = compare_runs(paths.reference, paths.candidate, workers=1)
        self.diagnostic: Diagnostic = diagnostic_of(self.report, paths)
        #: The file with the whole report; empty before somebody asks.
        self.rest = ""
        self._explanations: list[Explanation] | None = None

    @property
    def explanations(self) -> list[Explanation]:
        """Return every edit that can be computed for the first diff of a tensor."""
        if self._explanations is None:
            comparison = RunComparison(*self.paths.map(open_run))
            for number in comparison.common():
                comparison.first(comparison.diffs(number))
                if comparison.scene is not None:
                    break
            first = self.report.first_diff
            cause = None if first is None else first.cause
            known = [] if comparison.scene is None else explanations(comparison.scene, cause)
            texts = {each.text for each in known if each.proven}
            named = [each for each in map(_explanation, filter(None, (first, *self.report.independent))) if each]
            self._explanations = [*(each for each in named if each.text not in texts), *known]
        return self._explanations

    @property
    def has(self) -> dict[str, object]:
        """Return the settings of the candidate's optimizers, as far as all groups have one value."""
        values: dict[str, set[object]] = {}
        for key, value in open_run(self.paths.candidate).info.settings.items():
            if key.startswith("optimizer.") and isinstance(value, (int, float)):
                values.setdefault(key.rpartition(".")[2], set()).add(float(value))
        return {name: next(iter(answers)) for name, answers in values.items() if len(answers) == 1}

    def of_fix(self, edit: str) -> list[Explanation]:
        """Return the proven cause of the first diff, if an edit is code of its fix, and none of the line as it is."""
        fix, first = self.diagnostic.fix, self.report.first_diff
        cause = None if first is None else first.cause
        texts = [re.sub(r"\s", "", text) for text in (edit, *((fix.new or "", fix.old or "") if fix else ("", "")))]
        is_code = _CODE.search(texts[0]) is not None
        if cause is None or not cause.proven or not is_code or texts[0] not in texts[1] or texts[0] in texts[2]:
            return []
        proven = [each for each in self.explanations if each.proven and each.text == cause.sentence]
        return proven or [Explanation(cause.kind, cause.sentence, cause.fix, 1.0, cause.remaining, True, declared=True)]

    def of_schedule(self, edit: str) -> list[Explanation]:
        """Return what an edit of a schedule's number makes of the learning rates; nothing if it is another number."""
        differences = [each for each in self.report.settings_differ if each.kind == "learning_rate"]
        schedule = schedule_of(
            edit,
            {
                each.step: each.values
                for each in differences
                if each.step > 0 and all(isinstance(value, (int, float)) for value in each.values)
            },
        )
        if schedule is None or self.report.first_diff is None:
            return []
        form, candidate_rates = schedule
        cause = self.report.first_diff.cause
        share = float(cause is not None and cause.kind == "learning_rate")
        text = (
            f"the learning rates follow one {form} schedule with this number, the candidate's with {candidate_rates:g}"
        )
        text = text if share else f"another difference, and not the first one: {text}"
        return [Explanation("learning_rate", text, "", share, None, False, declared=True)]


def _explanation(fault: FirstDiff) -> Explanation | None:
    """Return the cause of a fault as an edit, if the runs declare the cause or the report proves it; else `None`.

    A setting that is set alike is gone. A fault beside the first one leaves the first one as it is.
    """
    cause = fault.cause
    if cause is None or not (cause.proven or (fault.diff is None and cause.fix)):
        return None
    if fault.standing is Standing.FIRST:
        return Explanation(cause.kind, cause.sentence, cause.fix, 1.0, None, cause.proven, declared=True)
    text = f"another difference, at {position_text(fault)}, and not the first one: {cause.sentence}"
    return Explanation(cause.kind, text, cause.fix, 0.0, None, False, declared=True)


class Tools:
    """The tools over some folders; a context manager, which deletes the files with the rest of long answers.

    Args:
        folders: folders that may be read: runs, or folders above runs.

    Raises:
        UsageError: a folder is not there.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        for folder in folders:
            if is_remote(folder) or not os.path.isdir(folder):
                raise UsageError(f"there is no folder {printable(folder)}: give folders of this machine that hold runs")
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self._compared: OrderedDict[Any, _Compared] = OrderedDict()
        self._temporary = tempfile.TemporaryDirectory(prefix="padiff-mcp-")
        self._files: list[Path] = []

    def __enter__(self) -> Tools:
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the answer of a tool as JSON of at most 4 kB.

        Raises:
            PadiffError: the arguments are not those of the tool, or a run cannot be read.
        """
        tool = TOOLS.get(name)
        if tool is None:
            raise UsageError(f"there is no tool {printable(name)}; there are {', '.join(TOOLS)}")
        try:
            values: Any = msgspec.convert(dict(arguments), tool.arguments)
        except msgspec.ValidationError as error:
            raise UsageError(f"{name}: {printable(str(error))}") from error
        method: Callable[[Any], str] = getattr(self, f"_{tool.method}")
        return method(values)

    # -- the tools -----------------------------------------------------------------------------------------------------

    def _compare(self, pair: answers.Pair) -> str:
        compared = self._of(pair)
        if not os.path.exists(compared.rest):
            compared.rest = self._write("compare", json_parts(compared.report))
        return diagnostic_json(diagnostic_of(compared.report, compared.paths, (compared.rest,)))

    def _explain(self, place: answers.Place) -> str:
        report = self._of(place).report
        diffs = [
            diff
            for diff in report.diffs
            if diff.pair.step == place.step
            and any(record is not None and record.layer == place.layer for record in diff.pair.sides)
        ]
        if not diffs:
            steps = report.coverage.steps
            raise UsageError(
                f"nothing of the layer {printable(place.layer)} was compared in step {place.step}: the compared steps "
                f"are {', '.join(map(str, steps[:8]))}{', ...' if len(steps) > 8 else ''}; `compare` names layers"
            )
        first = report.first_diff
        here = first is not None and first.step == place.step and place.layer in (first.reference, first.candidate)
        layers = Both(
            next((d.pair.reference.layer for d in diffs if d.pair.reference is not None), None),
            next((d.pair.candidate.layer for d in diffs if d.pair.candidate is not None), None),
        )
        code = {}
        if report.models is not None:
            for side, path, lines in zip(("reference", "candidate"), layers, report.models.lines):
                frame = lines.get(path or "")
                if frame is not None:
                    code[side] = f"{frame.file}:{frame.line}  {frame.code}"
        answer = answers.Explained(
            step=place.step,
            reference_layer=layers.reference,
            candidate_layer=layers.candidate,
            first="" if first is None else position_text(first),
            is_first=here,
            cause=first.cause.text if here and first is not None and first.cause is not None else "",
            code=code,
            tensors=[_tensor_diff(diff) for diff in diffs],
        )
        return self._answered("explain", answer, ("tensors",))

    def _tensor(self, wanted: answers.Slice) -> str:
        axes = _axes(wanted.slice)
        run = open_run(self._path(wanted.run))
        if wanted.step not in run.numbers():
            raise UsageError(f"{printable(wanted.run)} has no step {wanted.step}: it has {_listed(run.numbers())}")
        records = [record for record in run.steps(wanted.step)[0].records if record.layer == wanted.layer]
        if not records:
            known = list(dict.fromkeys(record.layer for record in run.steps(wanted.step)[0].records))
            raise UsageError(
                f"{printable(wanted.run)} has no record of the layer {printable(wanted.layer)} in step {wanted.step}: "
                f"it has {printable(_listed(known))}"
            )
        chosen = [record for record in records if not wanted.tensor or _name(record) == wanted.tensor]
        if not chosen:
            names = _listed([_name(record) for record in records])
            raise UsageError(f"the layer has no tensor {printable(wanted.tensor)}: it has {printable(names)}")
        whole = [_values(record, axes, _MOST) for record in chosen]
        answer = answers.Tensors(step=wanted.step, layer=wanted.layer, tensors=whole)
        short = answers.Tensors(
            step=wanted.step,
            layer=wanted.layer,
            tensors=[msgspec.structs.replace(each, values=each.values[:_SHOWN]) for each in whole],
        )
        is_cut = any(len(each.values) > _SHOWN for each in whole)
        return self._answered("tensor", short, ("tensors",), answer, is_cut)

    def _what_if(self, wanted: answers.Edit) -> str:
        compared = self._of(wanted)
        if compared.report.outcome == MATCH:
            raise UsageError("the runs match: there is no difference that an edit could explain")
        known = compared.explanations
        found = (
            compared.of_fix(wanted.edit)
            or answering(wanted.edit, known, compared.has)
            or compared.of_schedule(wanted.edit)
        )
        first = compared.report.first_diff
        answer = answers.WhatIf(
            edit=wanted.edit,
            of="" if first is None else position_text(first),
            computed=[_share(each) for each in found],
            others=[_share(each) for each in known if each not in found and each.share > 0],
        )
        return self._answered("what_if", answer, ("computed", "others"))

    def _next_experiment(self, pair: answers.Pair) -> str:
        experiment = next_experiment(self._of(pair))
        return self._answered("next_experiment", experiment, ())

    # -- folders, and the rest of answers ------------------------------------------------------------------------------

    def _path(self, path: str) -> str:
        """Return the real path of a run folder.

        Raises:
            UsageError: the path is not inside of a folder that was given.
        """
        real = Path(os.path.realpath(path))
        if is_remote(path) or "\0" in path or not any(real == f or f in real.parents for f in self._folders):
            raise UsageError(
                f"{printable(path)} is not read: it is outside of the folders that padiff mcp was started with: "
                f"{printable(', '.join(map(str, self._folders)))}"
            )
        return str(real)

    def _of(self, pair: answers.Pair) -> _Compared:
        """Return the comparison of two runs, made anew if a run has changed."""
        paths = Both(self._path(pair.reference), self._path(pair.candidate))
        if paths.reference == paths.candidate:
            raise UsageError("both paths are one folder: a run that is compared with itself always matches")
        runs = paths.map(open_run)
        key = tuple((run.path, run.info.identity, tuple(run.numbers()), run.finished()) for run in runs)
        if key not in self._compared:
            self._compared[key] = _Compared(paths)
            while len(self._compared) > _KEPT:
                self._compared.popitem(last=False)
        self._compared.move_to_end(key)
        return self._compared[key]

    def _answered(self, name: str, answer: Any, lists: tuple[str, ...], whole: Any = None, is_cut: bool = False) -> str:
        """Return an answer as JSON; if it has no room, write all of it into a file that the answer names."""
        values = answers.escaped(msgspec.to_builtins(answer))
        text = answers.shortened(values, lists, "")
        if json.loads(text) == values and not is_cut:
            return text
        content = answers.escaped(msgspec.to_builtins(answer if whole is None else whole))
        rest = self._write(name, [json.dumps(content, indent=1)])
        return answers.shortened({**values, "rest": rest}, lists, rest)

    def _write(self, name: str, parts: Iterable[str]) -> str:
        """Write a file into the temporary folder, and return its path."""
        while len(self._files) >= _FILES:
            self._files.pop(0).unlink(missing_ok=True)
        handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".json", dir=self._temporary.name)
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(parts)
        self._files.append(Path(path))
        return path


def next_experiment(compared: _Compared) -> answers.Experiment:
    """Return what to run next, by the state of a comparison."""
    report, diagnostic = compared.report, compared.diagnostic
    reference, candidate = (shlex.quote(printable(path)) for path in compared.paths)
    again = f"padiff compare {reference} NEW --brief"
    if report.outcome == MATCH:
        if report.moved is not None and not report.moved.enough:
            return answers.Experiment(
                "record more steps of both trainings", f"the match shows little: {report.moved.sentence}",
                "padiff run --dir NEW SCRIPT", "whether they stay equal once the weights have moved",
            )  # fmt: skip
        return answers.Experiment(
            "let the judge decide", "the runs match",
            f"padiff port-check {reference} {candidate} --receipt receipt.json",
            "whether something was left out of the comparison: its exceptions",
        )  # fmt: skip
    if report.outcome == CANNOT_TELL:
        return answers.Experiment(
            "record again with the optimizer, and without lists that leave layers out", diagnostic.notes[0],
            "padiff run --dir NEW SCRIPT", "whether the parameters without a record agree",
        )  # fmt: skip
    first = diagnostic.all_faults[0]
    cause = first.cause
    fix = f"padiff fix {reference} {candidate} -- COMMAND"
    fix = next((command for command in diagnostic.next if command.startswith("padiff fix ")), fix)
    if first.stage in ("weight", "input") and first.step == min(report.coverage.steps, default=0):
        call = "padiff.start_from" if first.stage == "weight" else "padiff.batches"
        return answers.Experiment(
            f"start the candidate equal, with {call}({compared.paths.reference!r}, ...), and record it again",
            f"{first.where} differs before the first step, so that everything else follows",
            again, "what differs once both start alike",
        )  # fmt: skip
    if cause is not None and cause.proven:
        edit = "" if first.fix is None else f": {first.fix.text}"
        return answers.Experiment(
            f"fix the cause{edit}", cause.text,
            fix, "whether the fault is gone, on a copy of the folder",
        )  # fmt: skip
    figures = None if report.first_diff is None or report.first_diff.diff is None else report.first_diff.diff.figures
    if figures is not None and figures.basis != "tensors":
        return answers.Experiment(
            f"record both again, with full tensors up to step {first.step}",
            f"{first.where} is known by a sketch only, from which no cause is proven",
            f"padiff run --dir NEW --detail full --stop-after {first.step + 1} SCRIPT", "the cause of the first fault",
        )  # fmt: skip
    best = next((each for each in compared.explanations if each.share > 0.5), None)
    if best is not None:
        return answers.Experiment(
            f"read the candidate's code there: {best.text}",
            f"this explains {best.share:.1%} of the first difference, and is not proven",
            fix, "whether an edit of that kind removes the fault",
        )  # fmt: skip
    if figures is None:
        return answers.Experiment(
            "make the settings equal, and record again", first.where, again, "whether a tensor differs, too",
        )  # fmt: skip
    return answers.Experiment(
        "compute the first difference alone, with the recorded tensors",
        "no edit that padiff can compute explains it" if cause is None else cause.text,
        f"padiff repro {reference} {candidate} --out repro/", "which side computes something else",
    )  # fmt: skip


def _tensor_diff(diff: Diff) -> answers.TensorDiff:
    excess = diff.excess
    outcome = "differ" if not diff.passed else "match" if diff.compared else "not compared"
    times = float(f"{excess:.3g}") if diff.compared and math.isfinite(excess) else None
    return answers.TensorDiff(_name(diff.pair.anchor), outcome, times, figures_text(diff))


def _name(record: Record) -> str:
    """Return stage, slot and call of a record: its site without the layer."""
    return record.site[len(record.layer) + 1 :]


def _share(each: Explanation) -> answers.Share:
    remaining = None if each.remaining is None else float(f"{each.remaining:.3g}")
    return answers.Share(each.text, each.fix, round(each.share, 4), remaining, each.proven)


def _values(record: Record, axes: tuple[Any, ...], most: int) -> answers.Values:
    sketch = record.sketch
    values: list[Any] = []
    if sketch is not None:
        figures = [sketch.minimum, sketch.maximum, sketch.mean, sketch.l2]
    else:
        array = np.asarray(record.value)
        if array.dtype.kind not in "biufc":
            array = array.astype(np.float32)
        try:
            part = array[axes] if axes else array
        except IndexError as error:
            raise UsageError(f"the slice does not fit the shape {list(record.shape)}: {error}") from error
        numbers = (np.abs(array) if array.dtype.kind == "c" else array).astype(np.float64)
        with np.errstate(all="ignore"):
            figures = [numbers.min(), numbers.max(), numbers.mean()] if numbers.size else [math.nan] * 3
            figures = [*map(float, figures), float(np.linalg.norm(numbers.ravel()))]
        values = [_plain(value) for value in np.ravel(part)[:most].tolist()]
    minimum, maximum, mean, l2 = map(_plain, figures)
    kept = "full" if sketch is None else "sketch"
    return answers.Values(_name(record), record.dtype, list(record.shape), kept, minimum, maximum, mean, l2, values)


def _plain(value: Any) -> Any:
    """Return a number for JSON: eight digits, and NaN, infinity and complex numbers as text."""
    if isinstance(value, float):
        return float(f"{value:.8g}") if math.isfinite(value) else str(value)
    return str(value) if isinstance(value, complex) else value


def _axes(text: str) -> tuple[Any, ...]:
    """Return the slices of a text such as ``0,:4,::2``.

    Raises:
        UsageError: it is none, or has more than eight axes.
    """
    if not text.strip():
        return ()
    axes: list[Any] = []
    for part in text.strip("[] ").split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or not part.strip() or len(axes) == 8 or match[4] == "0":
            raise UsageError(
                f"slice: expected numbers and ranges for up to 8 axes, such as 0,:4; got {printable(text)!r}"
            )
        start, colon, stop, every = match.groups()
        numbers = [None if number is None else int(number) for number in (start, stop, every)]
        axes.append(slice(*numbers) if colon else numbers[0])
    return tuple(axes)


def _listed(items: Sequence[Any]) -> str:
    shown = ", ".join("(loop)" if item == LOOP else str(item) for item in items[:12])
    return f"{shown}, and {len(items) - 12} more" if len(items) > 12 else shown
