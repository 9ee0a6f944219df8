"""The loop of ``padiff fix``: propose, try on a copy, compare, go on to the next fault."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from padiff.compare import Policy, compare_runs
from padiff.dump import open_run
from padiff.errors import PadiffError, UsageError
from padiff.model.given_map import GivenMap
from padiff.records import STAGES, Both, FirstDiff, Report
from padiff.records.compared import Diff, factor_text
from padiff.records.diagnostic import position_text
from padiff.system.frames import Frame
from padiff.system.terminal import printable
from padiff_cli.fix.fault import Fault
from padiff_cli.fix.rules import Rules
from padiff_cli.fix.source import Edit, Project, Proposal
from padiff_cli.fix.vocabulary import number_of, value_text
from padiff_cli.fix.workspace import Trial, Workspace

# Largest number of proposals that are tried for one fault, and of those after the first that helps.
_TRIALS, _MORE = 8, 2
# Number of other seeds, and calls that set one.
_SEEDS = 3
_SEEDING = (
    "manual_seed",
    "manual_seed_all",
    "seed",
    "default_rng",
    "RandomState",
    "Generator",
    "seed_everything",
    "set_seed",
)
# Steps that a trial trains beyond the fault's, and the smallest number of steps for which a run is shortened.
_BEHIND, _SHORT = 4, 12


@dataclass(frozen=True)
class Accepted:
    """A proposal that removed a fault.

    Attributes:
        proposal: the proposal.
        file, line: the first line that it changes, in the file before the change.
        proof: the fault's error before and after, in words.
    """

    proposal: Proposal
    file: str
    line: int
    proof: str


@dataclass
class Outcome:
    """The result of a session.

    Attributes:
        before, after: the project without and with all accepted proposals.
        report: the last comparison; `None` if none was made.
        accepted: the accepted proposals, in order.
        dropped: the proposals that did not help, in words.
        notes: remarks.
        trials: number of runs.
        seeds, failed_seeds: number of other seeds that were compared, and of those with which the runs differ.
    """

    before: Project
    after: Project
    report: Report | None = None
    accepted: list[Accepted] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trials: int = 0
    seeds: int = 0
    failed_seeds: int = 0

    @property
    def passed(self) -> bool:
        """Return True if the runs match now, with other seeds too."""
        return self.report is not None and self.report.passed and not self.failed_seeds

    @property
    def patch(self) -> str:
        """Return the unified diff of all accepted proposals."""
        return self.before.difference(self.after)


class Session:
    """Fixes the faults of a candidate one after the other.

    Args:
        runs: the run folders, as the user wrote them.
        workspace: the copies.
        seconds: the longest time of the whole session.
        say: called with a line of progress.
        policy, layer_map: of the comparison.
        reference_command: how the reference is run, to compare with other seeds; empty if it is not.
    """

    def __init__(
        self,
        runs: Both[str],
        workspace: Workspace,
        seconds: float,
        say: Callable[[str], None],
        policy: Policy | None = None,
        layer_map: GivenMap | None = None,
        reference_command: Sequence[str] = (),
    ) -> None:
        self._runs, self._workspace, self._say = runs, workspace, say
        self._policy, self._map, self._reference_command = policy, layer_map, reference_command
        self._end = time.monotonic() + seconds
        numbers = runs.map(lambda path: open_run(path).numbers())
        self._length = min(max(numbers.reference, default=0), max(numbers.candidate, default=0)) + 1
        every = open_run(runs.candidate).info.recording.get("every_n_steps", 1)
        self._every = every if isinstance(every, int) and not isinstance(every, bool) and every > 0 else 1
        self._all = Project.from_folder(workspace.folder, workspace.files)
        # The reference's script may lie beside the candidate's.
        scripts = workspace.scripts()
        has_code = any(name.endswith(".py") for name in scripts)
        project = self._all.reached_from(scripts) if has_code else self._all
        self._outcome = Outcome(project, project)

    @property
    def _left(self) -> float:
        return self._end - time.monotonic()

    def run(self) -> Outcome:
        """Fix faults until the runs match, no proposal helps, or the time is over.

        Raises:
            UsageError: the script does not run in the copy.
        """
        outcome = self._outcome
        first = self._try(outcome.before, self._length)
        if first is None:
            raise UsageError(
                f"the command does not run in a copy of the working folder: {outcome.dropped[-1]}. Give the command as "
                "it is called in this folder, and paths of data relative to it or absolute"
            )
        outcome.report = report = first
        self._check_code(report)
        if report.passed:
            outcome.notes.append("the candidate's code matches as it is: there is nothing to fix")
        unfixed: set[tuple[object, ...]] = set()
        while not report.passed and self._left > 0:
            fault = next((each for each in _faults(report) if _key(each) not in unfixed), None)
            if fault is None:
                break
            better = self._fix(report, fault)
            if better is None:
                unfixed.add(_key(fault))
            else:
                outcome.report = report = better
        if not report.passed and self._left <= 0:
            outcome.notes.append("the time is over: give --timeout with more seconds to go on")
        if report.passed and outcome.accepted and self._reference_command:
            self._check_seeds()
        return outcome

    def _check_seeds(self) -> None:
        """Compare the patched candidate with the reference on other seeds, and keep what was found."""
        outcome = self._outcome
        for number in range(1, _SEEDS + 1):
            seeded = _with_seeds(outcome.after, self._all.without(outcome.after), number)
            if seeded is None:
                outcome.notes.append("no other seeds were tried: no seed is a number in the code")
                return
            if self._left <= 0:
                outcome.notes.append(f"the time is over: {outcome.seeds} of {_SEEDS} other seeds were tried")
                return
            changed = self._all.changed_files(seeded)
            first, second = self._workspace.run_both(
                changed, self._reference_command, self._length, self._every, self._left
            )
            outcome.trials += 2
            try:
                trouble = first.trouble if second is None else second.trouble
                if first.run is None or second is None or second.run is None:
                    outcome.notes.append(f"other seeds were not tried: {trouble}")
                    return
                report = compare_runs(first.run, second.run, policy=self._policy, layer_map=self._map, workers=1)
                outcome.seeds += 1
                if not report.passed:
                    outcome.failed_seeds += 1
                    place = "" if report.first_diff is None else f", first at {position_text(report.first_diff)}"
                    outcome.notes.append(f"with other seeds (each one + {_seed_step(number)}) the runs differ{place}")
            except PadiffError as error:
                outcome.notes.append(f"other seeds were not compared: {error}")
                return
            finally:
                self._workspace.discard(first)

    def _fix(self, report: Report, first: FirstDiff) -> Report | None:
        """Try the proposals for a fault; return the report with the best one, or `None` if none helps."""
        assert report.models is not None
        project = self._outcome.after
        reference_code = _reference_code(self._all, report)
        length = max(report.coverage.steps, default=-1) + 1
        known = Fault(first, report.models, self._runs.reference, reference_code, report.settings_differ, length)
        rules = Rules(known, project)
        proposals = rules.proposals()
        self._say(f"{position_text(first)}: {len(proposals)} proposal{'s' if len(proposals) != 1 else ''}")
        if not proposals:
            self._outcome.notes.append(_in_words(first, rules, project))
        best: tuple[Proposal, Project, Report] | None = None
        tried = more = 0
        for proposal in proposals:
            patched = project.with_edits(proposal.edits)
            if patched is None or tried == _TRIALS or more > _MORE or self._left <= 0:
                continue
            if not project.defines_all(patched):
                continue
            tried, more = tried + 1, more + (best is not None)
            self._say(f"  trying: {proposal.words} ({_place(project, proposal)})")
            steps = self._steps(first)
            result = self._try(patched, steps)
            if result is not None and steps < self._length and _helps(report, first, result):
                result = self._try(patched, self._length)
            if result is None or not _helps(report, first, result):
                self._outcome.dropped.append(f"{_place(project, proposal)}: {proposal.words}")
                continue
            if best is None or result.passed or _rank(report, result) > _rank(report, best[2]):
                best = (proposal, patched, result)
            if result.passed or _is_sure(report, first, result) or _is_known(report, result):
                break
        if best is None:
            return None
        proposal, self._outcome.after, result = best
        edit, left = proposal.edits[0], {_key(each) for each in _faults(result)}
        # Of several faults another one than the first may be gone.
        gone = next((each for each in [first, *_faults(report)] if _key(each) not in left), first)
        self._outcome.accepted.append(Accepted(proposal, edit.file, _line(project, proposal), _proof(gone, result)))
        self._say(f"  kept: {proposal.words}")
        return result

    def _steps(self, first: FirstDiff) -> int:
        return self._length if self._length <= _SHORT else min(self._length, first.step + _BEHIND)

    def _try(self, project: Project, steps: int) -> Report | None:
        """Run a state of the project, and compare it; `None` if it does not run."""
        changed = self._outcome.before.changed_files(project)
        trial = self._workspace.run(changed, steps, self._every, self._left)
        self._outcome.trials += 1
        try:
            if trial.run is None:
                self._outcome.dropped.append(trial.trouble)
                return None
            return self._compared(trial, steps)
        except PadiffError as error:
            self._outcome.dropped.append(str(error))
            return None
        finally:
            self._workspace.discard(trial)

    def _compared(self, trial: Trial, steps: int) -> Report | None:
        assert trial.run is not None
        recorded = open_run(trial.run).numbers()
        if not recorded or (trial.trouble and len(recorded) < steps // self._every):
            self._outcome.dropped.append(trial.trouble or "it recorded no step")
            return None
        report = compare_runs(
            self._runs.reference, trial.run, policy=self._policy, layer_map=self._map, workers=1, steps=range(steps)
        )
        # The run folder is deleted: what is looked at later is read now.
        _ = report.failed, [diff.excess for diff in report.diffs if diff.figures is not None]
        return report

    def _check_code(self, report: Report) -> None:
        """Check that the copy ran its own code.

        Raises:
            UsageError: it imported files of the working folder itself.
        """
        folder = os.path.join(str(self._workspace.folder), "")
        lines = () if report.models is None else report.models.lines.candidate.values()
        for frame in lines:
            if frame.file.startswith(folder):
                raise UsageError(
                    f"the script imports {printable(frame.file)} from the working folder itself, not from the copy (an "
                    "editable install?): fix cannot try a change of that file"
                )


def _seed_step(number: int) -> int:
    return 1000 * number


def _with_seeds(own: Project, others: Project, number: int) -> Project | None:
    """Return all files with other seeds, the same ones on both sides; `None` if no seed is a number in the code.

    Args:
        own: the candidate's files.
        others: all other files.
        number: number of the seed.
    """
    edits: list[Edit] = []
    project = Project([*own, *others])
    for source, call in project.calls(*_SEEDING):
        for argument in [*call.args[:1], *(each.value for each in call.keywords if each.arg == "seed")]:
            values = [(source, argument)] if value_text(argument) else project.definitions(source, argument)
            for place, value in values:
                seed = number_of(value)
                if seed is not None and seed == int(seed) >= 0:
                    start, end = place.span(value)
                    edits.append(Edit(place.file, start, end, str(int(seed) + _seed_step(number))))
    return project.with_edits(edits) if edits else None


def _faults(report: Report) -> list[FirstDiff]:
    """Return the faults in the order in which they are fixed: models that are built alike also start alike."""
    faults = [*([] if report.first_diff is None else [report.first_diff]), *report.independent]
    return sorted(faults, key=lambda each: each.cause is not None and each.cause.kind == "start_weights")


def _key(first: FirstDiff) -> tuple[object, ...]:
    """Return what identifies a fault in reports of several runs."""
    kind = "" if first.cause is None else first.cause.kind
    return first.stage, first.reference, first.candidate, first.slot, kind


def _order(report: Report, first: FirstDiff) -> tuple[int, int, int]:
    """Return the position of a fault in causal order."""
    stage = STAGES.index(first.stage) if first.stage in STAGES else len(STAGES)
    if first.diff is None:
        return first.step, stage, -1
    anchor, beside = first.diff.pair.anchor, -1
    for k, diff in enumerate(report.diffs):
        own = diff.pair.anchor
        if diff.pair.step == first.step and own.site == anchor.site:
            return first.step, stage, 2 * k
        if beside < 0 and diff.pair.step == first.step and (own.stage, own.layer) == (anchor.stage, anchor.layer):
            beside = k
    # The input of a layer, which is compared only where something differs, comes before what the layer gives.
    return first.step, stage, 2 * beside - 1 if beside >= 0 else 0


def _rank(before: Report, after: Report) -> tuple[bool, tuple[int, int, int], int]:
    """Return how good a report is: later first diffs are better, then fewer diffs."""
    first = after.first_diff
    order = (1 << 30, 0, 0) if first is None else _order(before, first)
    return after.passed, order, -len(after.failed)


def _measured(report: Report) -> int:
    """Return the number of pairs that have both sides."""
    return report.coverage.compared - report.coverage.missing


def _cut(before: Report, after: Report) -> int:
    """Return the number of pairs of layers that end elsewhere, as only the latter report knows, and of layers whose
    weight another layer has now.
    """
    cut = {*after.coverage.cut_elsewhere} - {*before.coverage.cut_elsewhere}
    ties = [each.parameters.candidate for each in before.settings_differ if each.kind == "tied"]
    layers = set() if after.models is None else {layer.path for layer in after.models.layers.candidate}
    gone = {path for sites in ties for path in (site.rpartition("/")[0] for site in sites)} - layers
    pairs = [diff.pair for diff in before.diffs] if cut or gone else []
    paths = [pair.sides.map(lambda record: "" if record is None else record.layer) for pair in pairs]
    return sum(" / ".join(pair) in cut or pair.candidate in gone for pair in paths)


def _helps(before: Report, fault: FirstDiff, after: Report) -> bool:
    """Return True if a fault is gone, no other one came, and as much is compared as before."""
    if _measured(after) < _measured(before) - _cut(before, after) or len(after.coverage.steps) < len(
        before.coverage.steps
    ):
        return False
    if after.passed:
        return True
    first = after.first_diff
    declared, after_it = ({(each.name, str(each.values)) for each in report.settings_differ if each.changes}
                      for report in (before, after))  # fmt: skip
    if first is None or not after_it <= declared:
        return False
    start = before.first_diff or fault
    fewer = {name for name, _ in after_it} < {name for name, _ in declared} and len(after.failed) <= len(before.failed)
    if fewer and (first.diff is None or _order(before, first) >= _order(before, start)):
        # Of several faults at one place a setting is right now; a fault without a diff is one of the others.
        return True
    if _key(fault) in {_key(each) for each in _faults(after)}:
        return False
    if before.first_diff is not None and fault is not before.first_diff:
        # A fault beside the first one: that one stays. What follows from it may fail at more or fewer places.
        return not _grows(fault, after) and {_key(each) for each in _faults(after)} < {
            _key(each) for each in _faults(before)
        }
    orders = (_order(before, fault), _order(before, first))
    if orders[1] == orders[0] and _is_proven(first) and not _is_proven(fault):
        return True  # of two faults at one place the one that is left is known now
    return orders[1] > orders[0] or (orders[1] == orders[0] and fault.diff is None)


def _grows(fault: FirstDiff, after: Report) -> bool:
    """Return True if the error at the place of a fault is larger than before."""
    diff, later = fault.diff, _later(fault, after)
    both = None if diff is None or later is None else (diff.figures, later.figures)
    return both is not None and None not in both and later.excess > diff.excess  # type: ignore[union-attr]


def _later(fault: FirstDiff, after: Report) -> Diff | None:
    """Return the diff of another comparison at the place of a fault."""
    if fault.diff is None:
        return None
    site = fault.diff.pair.anchor.site
    return next((each for each in after.diffs if (each.pair.step, each.pair.anchor.site) == (fault.step, site)), None)


def _is_proven(first: FirstDiff) -> bool:
    return first.cause is not None and first.cause.proven


def _is_sure(before: Report, fault: FirstDiff, after: Report) -> bool:
    """Return True if a proven fault is gone, and all faults that are left were reported before or come later."""
    first = after.first_diff
    # One cause may be seen at another layer once the fault is gone.
    known, left = ({(each[0], each[-1]) for each in map(_key, _faults(report))} for report in (before, after))
    is_later = first is not None and fault.diff is not None and first.step > fault.step
    is_gone = _key(fault) not in map(_key, _faults(after))
    return _is_proven(fault) and is_gone and (is_later or left <= known)


def _is_known(before: Report, after: Report) -> bool:
    """Return True if the fault that is left was reported before, beside the first one."""
    first = after.first_diff
    if first is None:
        return True
    if _key(first) in {_key(each) for each in before.independent}:
        return True
    settings = {each.name for each in before.settings_differ}
    return bool(settings) and first.slot in settings


def _proof(fault: FirstDiff, after: Report) -> str:
    """Return the error of a fault before and after a patch, in words."""
    place = position_text(fault)
    diff = fault.diff
    if diff is None:
        cause = "set differently" if fault.cause is None else fault.cause.sentence
        return f"{place}: {cause} -> set alike"
    before = "not compared" if diff.figures is None else f"{factor_text(diff.excess)} times the limit"
    if diff.problem is not None:
        before = str(diff.problem)
    later, text = _later(fault, after), "no difference"
    if later is not None and later.figures is not None:
        text = "equal to the bit" if not later.figures.l2 else f"{later.excess:.2g} times the limit"
    return f"{printable(place)}: {before} -> {text}"


def _place(project: Project, proposal: Proposal) -> str:
    return f"{proposal.edits[0].file}:{_line(project, proposal)}"


def _line(project: Project, proposal: Proposal) -> int:
    # An import that is added is not what the proposal is about.
    edits = [edit for edit in proposal.edits if "import " not in edit.text] or list(proposal.edits)
    source = project.get(edits[0].file)
    return 0 if source is None else source.text.count("\n", 0, edits[0].start) + 1


def _reference_code(project: Project, report: Report) -> Project:
    """Return the files of the working folder that are the reference's own: all recorded lines of them are there."""
    if report.models is None:
        return Project(())
    by_file: dict[str, list[Frame]] = {}
    stacks = (frame for stack in report.models.stacks.reference.values() for frame in stack if frame.code)
    for frame in (*report.models.lines.reference.values(), *stacks):
        by_file.setdefault(frame.file, []).append(frame)
    sources = [
        source
        for file, frames in by_file.items()
        if (source := project.get(file)) is not None and all(frame.is_line(source.line(frame.line)) for frame in frames)
    ]
    return Project(sources)


def _in_words(first: FirstDiff, rules: Rules, project: Project) -> str:
    """Return the place of a fault, and what is to be done, where there is no proposal."""
    frame = rules.lines.candidate
    cause = "its cause is not known" if first.cause is None else first.cause.sentence
    fix = f". By hand: {first.cause.fix}" if first.cause is not None and first.cause.fix else ""
    where = ""
    if frame is not None:
        where = f" ({frame.file}:{frame.line})"
        if project.get(frame.file) is None:
            where += ", which is no file of the working folder: generated, installed, or a notebook"
    return printable(f"no edit is known for {position_text(first)}{where}: {cause}{fix}")
