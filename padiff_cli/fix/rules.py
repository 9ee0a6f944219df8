"""Proposals that remove a fault: edits of the candidate's source, the most likely one first."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from padiff.frameworks.catalog import LAYERS, number_text
from padiff.model.equivalents import common_kind
from padiff.records import Both
from padiff.records.diagnostic import named_at
from padiff.records.recorded import ROOT
from padiff.system.construction import definitions_in
from padiff.system.frames import Frame
from padiff_cli.fix.fault import Fault
from padiff_cli.fix.groups import parameter_groups
from padiff_cli.fix.insertions import insertions, literals, places
from padiff_cli.fix.lines import nodes_at, parsed_line
from padiff_cli.fix.matching import Change, Match, Matcher, UnwritableError, Writer, inner_expressions
from padiff_cli.fix.source import (
    Edit,
    Project,
    Proposal,
    Source,
    dotted,
    last_name,
    line_after,
    line_before,
    line_removed,
)
from padiff_cli.fix.trainers import trainer_arguments
from padiff_cli.fix.vocabulary import (
    KEYWORDS,
    TAKING_ACTIVATION,
    UNARY,
    argument_name,
    common_argument,
    common_call,
    kind_of,
    number_of,
    value_text,
)

# Largest cost of two lines that are compared, and of lines that are searched for: others are other lines. Chosen.
_ALIKE, _NEAR = 6.0, 3.0
_SIGNED = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_OF_INPUT = re.compile(
    rf"the candidate's input is (?:the reference's|({_SIGNED}) times the reference's)(?: ({_SIGNED}))?"
)
_BY_CHANNEL = re.compile(r"by channel \(axis \d+\): (.+)")
_CHANNEL = re.compile(rf"({_SIGNED}) x ({_SIGNED})")
# Causes that name two numbers, or two calls with their arguments: the candidate's number comes first, the reference's
# call does.
_NUMBERS = re.compile(rf"is ({_SIGNED})(?: in the candidate)? for the reference's ({_SIGNED})(?![\w.])")
_TWO_CALLS = re.compile(r"(\w+\([^()]*(?:\([^()]*\)[^()]*)*\)) against (\w+\([^()]*(?:\([^()]*\)[^()]*)*\))")
_ACTIVATIONS = re.compile(r"uses (.+?) for the reference's (.+?)(?: \(|$)")
_NO_ACTIVATION = re.compile(r"has no activation, the reference (?:has )?(.+?)(?: \(|$)")
_SURPLUS = re.compile(r"(\w+)\(\) in `[^`]*` is left out")
# An argument with both values, and calls with an argument that only the reference makes.
_ARGUMENT = re.compile(r"(\w+)=[\w.+-]+ for the reference's ([\w.+-]*\w)")
_ONLY_REFERENCE = re.compile(r"only the reference calls (.*?)(?: there|$)")
_CALLED = re.compile(r"(\w+)\((\w+)=([-+.\w]+)\)")
_RATES = re.compile(rf"learning rates differ: ({_SIGNED})(?:, {_SIGNED})* against ({_SIGNED})")
_NAMED_CALL = re.compile(r"(\w+)\(\) in `")
_LAYER_OF = {"interpolate": "Upsample"}
_FLIPPED = re.compile(r"the candidate's input is flipped along axis (\d+)")
_OTHER_ORDER = re.compile(
    r"the candidate calls (\w+)\(\) in `[^`]*`, then (\w+)\(\) in `[^`]*`, where the reference calls (\w+)\(\) in "
    r"`[^`]*`, then (\w+)\(\) in `"
)
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
# Cost of a name that differs, where statements are searched for those most like them.
_OTHER_NAME = 0.5
# Statements that are compared where the reference's files are at hand, and their largest number.
_COMPARED, _STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.For), 300
# Ranks of proposals: a cause's own fix, the two lines, calls of a step, other lines.
_FIX, _LINES, _CALLS, _OTHERS = 0.0, 2.0, 1.0, 6.0
# Largest number of places of a number, and of numbers that only the reference has. Each is a run.
_NUMBER_PLACES, _OTHER_NUMBERS = 3, 3
# Numbers that say nothing by themselves.
_COMMON = frozenset((-1.0, 0.0, 1.0, 2.0))
_ZEROING = {"torch": "zero_grad", "paddle": "clear_grad"}


class Rules:
    """Writes proposals for one fault of a project."""

    def __init__(self, fault: Fault, project: Project) -> None:
        self._fault, self._project = fault, project
        self._first, self._models = fault.first, fault.models
        self._framework = fault.frameworks[1]
        self.lines: Both[Frame | None] = fault.lines

    def proposals(self) -> list[Proposal]:
        """Return proposals without duplicates, the most likely one first."""
        found = [
            *self._from_fix(),
            *self._from_lines(),
            *self._start(),
            *self._mode(),
            *self._zeroing(),
            *self._schedule(),
            *self._clipping(),
            *self._activation(),
            *self._elsewhere(),
            *self._total(),
            *self._numbers(),
            *self._arguments(),
            *self._named_arguments(),
            *self._surplus(),
            *self._swapped(),
            *self._missing_activation(),
            *self._detached(),
            *self._input(),
            *self._flipped(),
            *self._from_sources(),
            *self._other_numbers(),
            *insertions(self._fault, self._project),
            *trainer_arguments(self._fault, self._project),
            *parameter_groups(self._fault, self._project),
        ]
        unique: dict[tuple[Edit, ...], Proposal] = {}
        for proposal in sorted(found, key=lambda each: each.weight):
            edits = tuple(sorted(set(proposal.edits)))
            if any(map(self._changes, edits)) and not any(map(self._is_of_padiff, edits)):
                unique.setdefault(edits, replace(proposal, edits=edits))
        return list(unique.values())

    def _changes(self, edit: Edit) -> bool:
        source = self._project.get(edit.file)
        return source is not None and source.text[edit.start : edit.end] != edit.text

    def _is_of_padiff(self, edit: Edit) -> bool:
        """Return True if an edit is inside of a call of padiff: recording and comparing never change."""
        source = self._project.get(edit.file)
        if source is None:
            return False
        for node in source.nodes:
            if isinstance(node, ast.Call) and source.full_name(node.func).startswith("padiff"):
                start, end = source.span(node)
                if start < edit.end and edit.start < end:
                    return True
        return False

    # -- the cause's own fix ---------------------------------------------------------------------------------------

    def _from_fix(self) -> Iterator[Proposal]:
        """Yield the fix of the cause, those of settings that differ at its stage, and the first of each together."""
        settings = [each.fix for each in self._fault.settings if each.changes and each.stage == self._first.stage]
        together: list[Proposal] = []
        for k, fix in enumerate(dict.fromkeys([self._fault.fix, *settings])):
            proposals = [each for part in fix.split("; ") for each in self._of_call(part, _OTHERS - 1 if k else _FIX)]
            together += sorted(proposals, key=lambda each: each.weight)[:1]
            yield from proposals
        if len(together) > 1:
            edits = [edit for each in together for edit in each.edits]
            yield Proposal(tuple(edits), "all settings as the reference has them", _FIX + 0.9)

    def _of_call(self, fix: str, weight: float) -> Iterator[Proposal]:
        """Yield what a call in the words of a fix changes."""
        call = _parsed_call(fix)
        for source, node in self._targets(call) if call is not None else ():
            assert call is not None
            match = Matcher((self._framework, self._framework)).match(call, node)
            kinds = ("value", "add", "rename")
            changes = [x for x in match.changes if x.kind in kinds or (x.kind == "whole" and x.name)]
            names = (last_name(call.func), last_name(node.func))
            if kind_of(names[0]) == "optimizer" and {*names} == {"SGD", "Momentum"}:
                # One rule has two classes in paddle.
                changes.append(Change("rename", node, names[0], call))
            yield from self._written(source, match, changes, weight)

    def _targets(self, fix: ast.Call) -> list[tuple[Source, ast.Call]]:
        """Return the calls of the candidate that a fix may be about."""
        name = last_name(fix.func)
        keys = [self._first.candidate or "", *self._models.lines.candidate]
        kind = kind_of(name)
        frames = [self.lines.candidate, self._models.lines.candidate.get(keys[0])]
        frames += [
            frame
            for key, frame in self._models.lines.candidate.items()
            if (kind == "optimizer" and key.startswith("optimizer."))
            or (kind == "loss" and key.startswith("@loss:"))
            or (kind == "clip" and key == "@clip")
        ]
        calls: dict[ast.Call, Source] = {}
        for frame in filter(None, frames):
            source, statement = self._project.statement_at(frame)
            for node in ast.walk(statement) if statement is not None else ():
                if source is not None and isinstance(node, ast.Call) and _may_be(last_name(node.func), name):
                    calls.setdefault(node, source)
        if not calls:
            for source in self._project:
                for node in source.nodes:
                    if isinstance(node, ast.Call) and _may_be(last_name(node.func), name):
                        calls[node] = source
        return [(source, node) for node, source in calls.items()][:4]

    # -- the reference's line and the candidate's --------------------------------------------------------------------

    def _from_lines(self) -> Iterator[Proposal]:
        for reference, source, line, weight in self._pairs():
            best: tuple[Match, ast.AST] | None = None
            for node in nodes_at(source, line, reference):
                match = Matcher(self._fault.frameworks).statement(reference, node)
                if best is None or match.cost < best[0].cost:
                    best = (match, node)
                if isinstance(reference, ast.stmt) and node is source.statement(line) and match.cost <= _ALIKE:
                    break  # a whole line against a whole statement
            if best is None or best[0].cost > _ALIKE:
                continue
            yield from self._written(source, best[0], list(best[0].changes), weight)

    def _pairs(self) -> Iterator[tuple[ast.AST, Source, int, float]]:
        """Yield nodes of the reference with the candidate's lines that answer to them, and a weight."""
        lines = self._models.lines
        pairs: list[tuple[Frame | None, Frame | None, float]] = [(*self.lines, _LINES)]
        stacks = self._first.stacks.zip(self._models.stacks).map(_frames)
        pairs += [(one, other, _LINES + 1) for one, other in zip(*stacks)]
        layers = (self._first.reference or "", self._first.candidate or "")
        pairs.append((lines.reference.get(layers[0]), lines.candidate.get(layers[1]), _LINES + 1))
        while all(layers) and "." in layers[0] + layers[1]:
            layers = (layers[0].rpartition(".")[0], layers[1].rpartition(".")[0])
            pairs.append((lines.reference.get(layers[0]), lines.candidate.get(layers[1]), _LINES + 1.5))
        for key, frame in lines.reference.items():
            if key in lines.candidate and _is_about(key, self._fault):
                pairs.append((frame, lines.candidate[key], _LINES + 2))
                # Arguments of the call that stand on other lines.
                head, own = (f"{each.file}:{each.line}#" for each in (frame, lines.candidate[key]))
                pairs += [
                    (value, defined, _LINES + 2.5)
                    for name, value in lines.reference.items()
                    for other_name, defined in lines.candidate.items()
                    if name.startswith(head)
                    and other_name.startswith(own)
                    and _argument_of(name) == _argument_of(other_name)
                ]
                pairs += [
                    (value, lines.candidate[key], _LINES + 3)
                    for name, value in lines.reference.items()
                    if name.startswith(head)
                ]
        seen = set()
        for one, other, weight in pairs:
            if one is None or other is None or (one, other) in seen:
                continue
            seen.add((one, other))
            source = self._project.get(other.file)
            reference = self._reference_node(one)
            if source is not None and reference is not None:
                yield reference, source, other.line, weight

    def _elsewhere(self) -> Iterator[Proposal]:
        """Yield what a line of the reference says of the candidate's lines that use the same layers."""
        if self._first.stage not in ("forward", "backward") or self._models.lines.candidate == {}:
            return
        partners = {(_tail(each.reference), _tail(each.candidate)) for each in self._models.partners}
        paired = {reference for reference, _ in partners}
        stacks = self._first.stacks.zip(self._models.stacks).map(_frames)
        references = [self._reference_node(each) for each in (self.lines.reference, *stacks.reference) if each]
        matches: list[tuple[float, Source, Match]] = []
        # Statements of the functions that lead to the fault may have no layer.
        places = map(self._project.statement_at, (self.lines.candidate, *stacks.candidate))
        around = {source.function(node) for source, node in places if source is not None and node is not None}
        for reference in references[:3]:
            if not isinstance(reference, (ast.Assign, ast.Return, ast.Expr, ast.AugAssign)):
                continue
            computes = any(isinstance(each, (ast.Call, ast.BinOp)) for each in ast.walk(reference))
            for source in self._project:
                for node in source.nodes:
                    function = source.function(node)
                    if not isinstance(node, type(reference)) or function is None:
                        continue
                    match = Matcher(self._fault.frameworks).statement(reference, node)
                    layers = [(_tail(one), _tail(other)) for one, other in match.names if one.startswith("self.")]
                    alike = all(pair in partners or pair[0] not in paired for pair in layers)
                    is_near = bool(layers) or (computes and function in around)
                    if is_near and alike and match.changes and match.cost <= _NEAR:
                        matches.append((match.cost, source, match))
        for _, source, match in sorted(matches, key=lambda each: each[0])[:3]:
            yield from self._written(source, match, list(match.changes), _LINES + 1.5)

    def _activation(self) -> Iterator[Proposal]:
        """Yield the reference's activation in the place of the candidate's, where the cause names both."""
        found = _ACTIVATIONS.search(self._fault.words) if self._fault.kind == "activation" else None
        if found is None:
            return
        own, other = _activation_of(found[1]), _activation_of(found[2])
        yield from self._activation_name(own, other)
        source, statement = self._project.statement_at(self.lines.candidate)
        for node in ast.walk(statement) if source is not None and statement is not None else ():
            assert source is not None
            if not isinstance(node, ast.Call) or common_call(last_name(node.func)) != common_call(own):
                continue
            is_layer = kind_of(last_name(node.func)) == "layer"
            if common_call(own) == common_call(other):
                yield from self._settings_of(source, node)
                continue
            names = (
                each
                for each in LAYERS[self._framework]
                if common_kind(each.lower()) == common_kind(other.replace("_", ""))
            )
            name = min(names, default="") if is_layer else other
            if name and kind_of(name):
                changes = [Change("rename", node, name, node)]
                if own == "leaky_relu" or (own == "gelu" and other != "gelu"):
                    changes += [
                        Change("remove", each) for each in (*(node.args if is_layer else node.args[1:]), *node.keywords)
                    ]
                for proposal in self._written(source, Match(0.0), changes, _LINES):
                    yield replace(proposal, weight=_LINES - 0.2)

    def _activation_name(self, own: str, other: str) -> Iterator[Proposal]:
        """Yield the reference's activation where a text names the candidate's, and where a layer takes such a name."""
        for source in self._project:
            for node in source.nodes:
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                if {text, other} <= UNARY and common_call(text) == common_call(own):
                    edit = Edit(source.file, *source.span(node), source.code(node).replace(text, other))
                    yield Proposal((edit,), f"the activation is {other}", _LINES - 0.1)
        for source, call in self._project.calls(*TAKING_ACTIVATION):
            if not any(keyword.arg == "activation" for keyword in call.keywords):
                change = Change("add", call, "activation", ast.Constant(other))
                yield from self._written(source, Match(0.0), [change], _LINES - 0.4)

    def _settings_of(self, source: Source, call: ast.Call) -> Iterator[Proposal]:
        """Yield the settings of the layer that a cause names as arguments of a call of the same function."""
        paths = re.findall(r"`([^`]+)`", self._fault.words)
        layer = next((each for each in self._models.layers.reference if each.path in paths), None)
        values = {} if layer is None else layer.settings
        keywords = [
            ast.keyword(name, ast.Constant(value)) for name, value in values.items() if isinstance(value, (int, float))
        ]
        reference = ast.Call(call.func, [ast.Constant(...)], keywords)
        match = Matcher((self._framework, self._framework)).match(reference, call)
        yield from self._written(source, match, [each for each in match.changes if each.reference is not None], _FIX)

    def _missing_activation(self) -> Iterator[Proposal]:
        """Yield the reference's activation around the candidate's line, or behind the layer that still agrees."""
        found = _NO_ACTIVATION.search(self._fault.words)
        if found is None:
            return
        function = ast.Call(ast.Name(_activation_of(found[1])), [ast.Name("x")], [])
        source, statement = self._project.statement_at(self.lines.candidate)
        if source is not None and isinstance(statement, (ast.Assign, ast.Return)) and statement.value is not None:
            change = Change("wrap", statement.value, found[1], function, function.args[0])
            yield from self._written(source, Match(0.0), [change], _LINES - 0.2)
        for own, _, place in list(places(self._fault, self._project))[:3]:
            # Around what the layer is given, or around the layer before it.
            change = Change("wrap", place, found[1], function, function.args[0])
            yield from self._written(own, Match(0.0), [change], _LINES - 0.1)
        partners = {each.reference: each.candidate for each in self._models.partners}
        before = self._models.lines.candidate.get(partners.get(self._first.last_agreeing, ""))
        source, statement = self._project.statement_at(before)
        kind = _activation_of(found[1]).replace("_", "")
        name = min(
            (each for each in LAYERS[self._framework] if common_kind(each.lower()) == common_kind(kind)), default=""
        )
        for node in ast.walk(statement) if statement is not None and name else ():
            above = None if source is None else source.parents.get(node)
            is_item = isinstance(above, ast.List) or (
                isinstance(above, ast.Call) and last_name(above.func) == "Sequential"
            )
            if source is not None and before is not None and is_item and getattr(node, "lineno", 0) == before.line:
                change = Change("insert", node, "after", ast.Call(ast.Name(name), [], []))
                yield from self._written(source, Match(0.0), [change], _LINES - 0.2)

    def _detached(self) -> Iterator[Proposal]:
        """Yield expressions without `detach`, where no gradient comes back."""
        if (
            self._fault.kind not in ("detached", "loss_term_missing", "no_gradient")
            and "detach" not in self._fault.words
        ):
            return
        for source, call in self._project.calls("detach"):
            if isinstance(call.func, ast.Attribute):
                change = Change("unwrap", call, "detach", None, call.func.value)
                yield from self._written(source, Match(0.0), [change], _LINES + 0.5)

    def _reference_node(self, frame: Frame) -> ast.AST | None:
        own = self._fault.reference_code.get(frame.file)
        statement = None if own is None or not frame.is_line(own.line(frame.line)) else own.statement(frame.line)
        return parsed_line(frame.code) if statement is None else statement

    # -- writing -----------------------------------------------------------------------------------------------------

    def _written(self, source: Source, match: Match, changes: list[Change], weight: float) -> Iterator[Proposal]:
        """Yield a proposal for each change, and one for all of them."""
        names = _mapping(match.names)
        whole: list[Edit] = []
        for change in changes:
            more = 0.0 if change.name and named_at(self._fault.words, change.name) is not None else 0.3
            more += 1.0 if change.kind == "whole" else 0.0
            definitions = self._definitions(source, change)
            number = number_of(change.reference) if isinstance(change.reference, ast.expr) else None
            if number is not None and number in [number_of(node) for _, node in definitions]:
                continue  # it has the reference's value
            text = value_text(change.reference) if isinstance(change.reference, ast.expr) else ""
            defined = [Edit(place.file, *place.span(node), text) for place, node in definitions if text]
            for edit in defined:
                yield Proposal((edit,), f"{change.name or 'the value'} is {text} where it is defined", weight + more)
            call = self._made(source, change)
            if call is not None:
                # The object stands in a variable: the call that makes the object changes.
                inner = Matcher((self._framework, self._framework)).match(change.reference, call)  # type: ignore[arg-type]
                yield from self._written(source, inner, list(inner.changes), weight - 0.1)
            try:
                edits = self._entry(source, change) or Writer(source, self._framework, names).edits(change)
            except UnwritableError:
                continue
            whole += defined if len(defined) == 1 else edits
            yield Proposal(edits, _words(change, source), weight + more + 0.2)
        if len(changes) > 1:
            # Another function has other arguments.
            early = any(change.kind in ("rename", "wrap", "unwrap") for change in changes)
            yield Proposal(tuple(whole), "the line as the reference has it", weight + (0.15 if early else 0.9))

    def _made(self, source: Source, change: Change) -> ast.Call | None:
        """Return the call that makes the object of a variable, in the place of which the same call is to stand."""
        node, reference = change.node, change.reference
        if change.kind not in ("value", "whole") or not isinstance(reference, ast.Call) or not dotted(node):
            return None
        calls = [
            each.value
            for each in source.nodes
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)
            if dotted(node) in map(dotted, each.targets) and _called(each.value) == _called(reference)
        ]
        return calls[0] if len(calls) == 1 and kind_of(last_name(reference.func)) else None

    def _entry(self, source: Source, change: Change) -> tuple[Edit, ...]:
        """Return the edit of the entry that gives a call an argument by ``**``; empty if there is none."""
        node = change.node
        if change.kind != "add" or not isinstance(node, ast.Call) or not isinstance(change.reference, ast.expr):
            return ()
        text = value_text(change.reference)
        if not change.name or not text or all(keyword.arg for keyword in node.keywords):
            return ()
        name = argument_name(self._framework, common_argument(change.name), change.name)
        mappings = [keyword.value for keyword in node.keywords if keyword.arg is None]
        tables = [table for each in mappings for table in self._project.tables(source, each)]
        entries = self._project.entries(name) if not tables else [
            (place, value)
            for place, table in tables
            for _, key, value in definitions_in(table)
            if key == name
        ]  # fmt: skip
        if len(entries) != 1:
            return ()
        start, end = entries[0][0].span(entries[0][1])
        return (Edit(entries[0][0].file, start, end, text),)

    def _definitions(self, source: Source, change: Change) -> list[tuple[Source, ast.expr]]:
        node = change.node
        if change.kind != "value" or not isinstance(node, ast.expr) or value_text(node):
            return []
        found = self._project.definitions(source, node)
        if common_argument(change.name) == "lr" and isinstance(node, ast.Name):
            # A schedule, which holds the rate that it starts from.
            for each in source.nodes:
                if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
                    named = any(isinstance(target, ast.Name) and target.id == node.id for target in each.targets)
                    if named and kind_of(last_name(each.value.func)) == "schedule":
                        rates = [
                            *each.value.args[:1],
                            *(k.value for k in each.value.keywords if k.arg == "learning_rate"),
                        ]
                        for rate in rates:
                            found += [(source, rate)] if value_text(rate) else self._project.definitions(source, rate)
        return found

    # -- calls of a step ---------------------------------------------------------------------------------------------

    def _start(self) -> Iterator[Proposal]:
        """Yield the call that gives the candidate the reference's weights, after its model is made."""
        if self._fault.kind != "start_weights":
            return
        source, statement = self._project.statement_at(self._models.lines.candidate.get(ROOT))
        if source is None or not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            return
        call = f"padiff.start_from({_quoted(self._fault.reference_run)}, {statement.targets[0].id})"
        edits = [line_after(source, statement, call)]
        if not source.spelled("padiff"):
            edits.append(source.import_edit("padiff"))
        yield Proposal(tuple(edits), "the candidate starts from the reference's weights", _CALLS)

    def _mode(self) -> Iterator[Proposal]:
        if self._fault.kind not in ("mode", "not_called", "dropout", "batch_norm") and "mode" not in self._fault.words:
            return
        for source, call in self._project.calls("eval"):
            if isinstance(call.func, ast.Attribute) and not call.args:
                end = source.span(call.func)[1]
                edit = Edit(source.file, end - len("eval"), end, "train")
                yield Proposal((edit,), "the model is set to train", _CALLS)

    def _zeroing(self) -> Iterator[Proposal]:
        """Yield moves and additions of the call that zeroes gradients."""
        if self._fault.kind not in ("stale_gradient", "step_skipped", "no_gradient", "gradient_scale", "gradients"):
            return
        method = _ZEROING.get(self._framework, "zero_grad")
        for source, step, name in self._optimizer_steps():
            calls = [
                (call, statement)
                for call in source.calls("zero_grad", "clear_grad")
                if isinstance(statement := source.statement_around(call), ast.Expr) and statement.value is call
            ]
            backward = next(
                (source.statement_around(call) for call in source.calls("backward") if _near(source, call, step)), None
            )
            for call, statement in calls:
                if backward is not None and backward.lineno < statement.lineno < step.lineno:
                    text = source.code(call)
                    edits = (line_removed(source, statement), line_before(source, backward, text))
                    yield Proposal(edits, "gradients are zeroed before the backward pass", _CALLS)
                loop = source.parents.get(step)
                if isinstance(loop, (ast.For, ast.While)) and source.parents.get(statement) is not loop:
                    edits = (line_removed(source, statement), line_after(source, step, source.code(call)))
                    yield Proposal(edits, "gradients are zeroed after each step", _CALLS)
            if not source.calls("zero_grad", "clear_grad"):
                yield Proposal(
                    (line_after(source, step, f"{name}.{method}()"),), "gradients are zeroed after each step", _CALLS
                )

    def _schedule(self) -> Iterator[Proposal]:
        """Yield additions, moves and removals of the schedule's step."""
        if self._fault.kind != "learning_rate":
            return
        yield from self._first_rate()
        for source, step, _ in self._optimizer_steps():
            for name in _schedules(source):
                calls = [
                    statement
                    for call in source.calls("step")
                    if isinstance(call.func, ast.Attribute)
                    and dotted(call.func.value) == name
                    and isinstance(statement := source.statement_around(call), ast.Expr)
                ]
                last = _last_of_step(source, step)
                loop = source.parents.get(step)
                outer = None if loop is None else source.parents.get(loop)
                if calls and isinstance(loop, ast.For) and isinstance(outer, ast.For):
                    for statement in calls:
                        if source.parents.get(statement) is loop and len(loop.body) > 1:
                            text = source.code(statement)
                            edits = (line_removed(source, statement), line_after(source, loop, text))
                            yield Proposal(edits, "the schedule steps after each epoch", _CALLS + 0.5)
                own = source.function(step)
                for epoch in _called_in_loops(source, own) if own is not None and name.startswith("self.") else ():
                    for statement in calls:
                        if source.parents.get(statement) is loop and len(loop.body) > 1:  # type: ignore[union-attr]
                            edits = (
                                line_removed(source, statement),
                                line_after(source, epoch, source.code(statement)),
                            )
                            yield Proposal(edits, "the schedule steps after each epoch", _CALLS + 0.5)
                if not calls:
                    edit = line_after(source, last, f"{name}.step()")
                    yield Proposal((edit,), "the schedule steps with each step of the optimizer", _CALLS)
                for statement in calls:
                    text = source.code(statement)
                    is_beside = source.parents.get(statement) is source.parents.get(step)
                    if not is_beside or statement.lineno < step.lineno:
                        edits = (line_removed(source, statement), line_after(source, last, text))
                        yield Proposal(edits, "the schedule steps after each step of the optimizer", _CALLS)
                    if len(calls) > 1:
                        yield Proposal((line_removed(source, statement),), "the schedule steps once", _CALLS)

    def _first_rate(self) -> Iterator[Proposal]:
        """Yield the reference's first learning rate for the number in the schedule that is the candidate's."""
        rates = _RATES.search(self._fault.words)
        if rates is None or rates[1] == rates[2]:
            return
        for source, call in self._calls_in_project():
            if kind_of(last_name(call.func)) != "schedule":
                continue
            for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
                places = [(source, value)] if number_of(value) is not None else self._project.definitions(source, value)
                for place, node in places:
                    if number_of(node) == float(rates[2]):
                        edit = Edit(place.file, *place.span(node), number_text(float(rates[1])))
                        words = f"the schedule begins with {number_text(float(rates[1]))}"
                        yield Proposal((edit,), words, _CALLS + 0.6)

    def _clipping(self) -> Iterator[Proposal]:
        kind = self._fault.kind
        if not kind.startswith("clip"):
            return
        fix = self._fault.fix
        limits = [number_of(node) for node in ast.walk(_parsed_call(fix) or ast.Module([], []))
                  if isinstance(node, ast.expr)]  # fmt: skip
        limit = next((each for each in limits if each is not None), None)
        own = [(source, call) for source, call in self._project.calls("clip_grad_norm_", "clip_grad_value_")]
        if limit is not None and not own and self._framework == "torch":
            name = "clip_grad_value_" if "clip_grad_value_" in fix else "clip_grad_norm_"
            for source, step, _ in self._optimizer_steps():
                model = _model_of(source, step)
                head = source.spelled(f"torch.nn.utils.{name}")
                edits = [] if head or source.spelled("torch") else [source.import_edit("torch")]
                if model:
                    call = f"{head or f'torch.nn.utils.{name}'}({model}.parameters(), {number_text(limit)})"
                    edits.append(line_before(source, step, call))
                    yield Proposal(tuple(edits), "gradients are clipped as the reference's are", _CALLS)
        if limit is not None and self._framework == "paddle" and "grad_clip" in fix:
            kinds = re.findall(r"ClipGradBy(?:GlobalNorm|Norm|Value)", fix)
            for source, made in self._optimizer_calls() if kinds else ():
                if not any(keyword.arg == "grad_clip" for keyword in made.keywords):
                    value = ast.parse(f"paddle.nn.{kinds[0]}({number_text(limit)})", mode="eval").body
                    yield from self._written(source, Match(0.0), [Change("add", made, "grad_clip", value)], _CALLS)
        has_none = "the reference does not" in self._fault.words or "not set against" in self._fault.words
        if has_none and self._models.lines.reference.get("@clip") is None:
            for source, clip in own:
                statement = source.statement_around(clip)
                if isinstance(statement, ast.Expr):
                    yield Proposal((line_removed(source, statement),), "gradients are not clipped", _CALLS)
            for source, made in self._optimizer_calls():
                for keyword in made.keywords:
                    if keyword.arg == "grad_clip":
                        yield from self._written(source, Match(0.0), [Change("remove", keyword, "grad_clip")], _CALLS)

    # -- numbers and calls of a cause ------------------------------------------------------------------------------

    def _total(self) -> Iterator[Proposal]:
        """Yield the line that adds to the loss, where the candidate has none."""
        sides = self._models.lines.map(lambda lines: lines.get("@total"))
        if self._first.stage != "loss" or sides.reference is None or sides.candidate is None:
            return
        reference, source = self._reference_node(sides.reference), self._project.get(sides.candidate.file)
        own = None if source is None else source.statement(sides.candidate.line)
        if source is None or not isinstance(reference, ast.Assign) or not isinstance(own, ast.Assign):
            return
        target, value = dotted(own.targets[0]), reference.value
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if not target or dotted(reference.targets[0]) not in names or not isinstance(value, ast.BinOp):
            return
        try:
            models = {
                dotted(node.func.value): _model_of(source, own)
                for node in ast.walk(value)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "parameters"
            }
            named = {name: model for name, model in models.items() if name and model}
            text = Writer(source, self._framework, {**named, dotted(reference.targets[0]): target}).expression(value)
        except UnwritableError:
            return
        edit = line_after(source, _last_before_backward(source, own), f"{target} = {text}")
        yield Proposal((edit,), "the term that the reference's loss has is added", _LINES - 0.5)

    def _numbers(self) -> Iterator[Proposal]:
        """Yield the reference's number in the place of the candidate's, where the cause names both."""
        found = _NUMBERS.search(self._fault.words)
        if found is None:
            return
        own, text = float(found[1]), found[2]
        source, statement = self._project.statement_at(self.lines.candidate)
        weight = _LINES + 0.7
        nodes = [] if source is None or statement is None else [(source, node) for node in ast.walk(statement)]
        places = []
        for each, node in nodes:
            if isinstance(node, ast.expr) and not isinstance(node, ast.Call):
                known = number_of(node) is not None
                places += [(each, node)] if known else self._project.definitions(each, node)
        rest = [(each, node) for each, node, value in literals(self._project) if value == own]
        rest = rest if len(rest) <= _NUMBER_PLACES else []
        for k, (holder, value) in enumerate(dict.fromkeys([*places, *rest])):
            number = number_of(value)
            if number is not None and abs(number - own) <= 1e-6 * abs(number):
                start, end = holder.span(value)
                new = number_text(float(text)) if "." in holder.code(value) else text
                more = 0.0 if k < len(places) else 0.5
                yield Proposal((Edit(holder.file, start, end, new),), f"the number is {new}", weight + more)

    def _other_numbers(self) -> Iterator[Proposal]:
        """Yield the reference's number in the place of the candidate's, where each has one that the other has not.

        The reference's files have to be at hand.
        """
        sides = [
            [each for each in literals(project) if each[2] not in _COMMON]
            for project in (self._fault.reference_code.without(self._project), self._project)
        ]
        counts = [Counter(value for _, _, value in side) for side in sides]
        only = [
            [(source, node) for source, node, value in side if (count - other)[value]]
            for side, count, other in zip(sides, counts, reversed(counts))
        ]
        values = {number_of(node): source.code(node) for source, node in only[0]}
        if not 0 < len(values) <= _OTHER_NUMBERS:
            return
        for source, node in only[1][: 2 * _OTHER_NUMBERS]:
            start, end = source.span(node)
            for text in values.values():
                words = f"the number is {text}, which only the reference has"
                # One number against one says most.
                weight = _LINES - 0.1 if len(values) == len(only[1]) == 1 else _OTHERS + 0.5
                yield Proposal((Edit(source.file, start, end, text),), words, weight)

    def _arguments(self) -> Iterator[Proposal]:
        """Yield the reference's arguments in the place of the candidate's, where the cause names the calls."""
        sentence = "" if self._first.cause is None else self._first.cause.sentence
        found = _TWO_CALLS.search(sentence)
        source, statement = self._project.statement_at(self.lines.candidate)
        calls = [_parsed_call(text) for text in found.groups()] if found is not None else [None]
        if source is None or statement is None or None in calls:
            return
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _may_be(last_name(node.func), last_name(calls[0].func)):  # type: ignore[union-attr]
                reference = ast.Call(calls[0].func, [ast.Constant(...)], calls[0].keywords)  # type: ignore[union-attr]
                match = Matcher((self._fault.frameworks[0], self._framework)).match(reference, node)
                yield from self._written(
                    source, match, [each for each in match.changes if each.kind == "value"], _LINES
                )

    def _named_arguments(self) -> Iterator[Proposal]:
        """Yield arguments that the cause names with the reference's value, in calls of the function that it names."""
        wanted: list[tuple[str, str, str]] = [
            ("", found[1], found[2]) for found in _ARGUMENT.finditer(self._fault.words)
        ]
        for text in _ONLY_REFERENCE.findall(self._fault.words):
            wanted += [(found[1], found[2], found[3]) for found in _CALLED.finditer(text)]
        for function, argument, text in wanted:
            value = _parsed_value(text)
            common = common_argument(argument)
            if value is None:
                continue
            for source, call in self._calls_in_project():
                name = last_name(call.func)
                if function and common_call(name) != common_call(function):
                    continue
                for keyword in call.keywords:
                    if keyword.arg and common_argument(keyword.arg) == common and keyword.arg in KEYWORDS:
                        change = Change("value", keyword.value, common, value)
                        yield from self._written(source, Match(0.0), [change], _LINES - 0.1)
            named = _NAMED_CALL.findall(self._fault.words)
            for source, call in self._calls_in_project() if not function else ():
                name = last_name(call.func)
                has = any(keyword.arg and common_argument(keyword.arg) == common for keyword in call.keywords)
                if not has and any(name == each or _LAYER_OF.get(each) == name for each in named):
                    yield from self._written(source, Match(0.0), [Change("add", call, common, value)], _LINES)

    def _calls_in_project(self) -> Iterator[tuple[Source, ast.Call]]:
        for source in self._project:
            for node in source.nodes:
                if isinstance(node, ast.Call) and kind_of(last_name(node.func)):
                    yield source, node

    def _flipped(self) -> Iterator[Proposal]:
        """Yield removals and additions of a flip of the input."""
        found = _FLIPPED.search(self._fault.words)
        if found is None:
            return
        for source in self._project:
            for node in source.nodes:
                if isinstance(node, ast.Subscript) and _is_reversal(node.slice):
                    change = Change("unwrap", node, "[::-1]", None, node.value)
                    yield from self._written(source, Match(0.0), [change], _LINES)
                if isinstance(node, ast.Call) and last_name(node.func) in ("flip", "cvtColor"):
                    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
                    is_method = owner is not None and dotted(owner) not in source.modules
                    inner = owner if is_method else next(iter(node.args), None)
                    if inner is not None:
                        change = Change("unwrap", node, last_name(node.func), None, inner)
                        yield from self._written(source, Match(0.0), [change], _LINES)
        _, statement = self._project.statement_at(self._models.lines.candidate.get(ROOT))
        targets = {dotted(each) for each in getattr(statement, "targets", [])} - {""}
        for source in self._project:
            for node in source.nodes:
                if isinstance(node, ast.Call) and dotted(node.func) in targets and len(node.args) == 1:
                    end = source.span(node.args[0])[1]
                    if isinstance(node.args[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
                        edit = Edit(source.file, end, end, f".flip([{found[1]}])")
                        yield Proposal((edit,), f"the input is flipped along axis {found[1]}", _LINES + 0.5)

    def _surplus(self) -> Iterator[Proposal]:
        """Yield the candidate's line without a call or operator that the cause names."""
        found = _SURPLUS.search(self._fault.words)
        source, statement = self._project.statement_at(self.lines.candidate)
        if found is None or source is None or statement is None:
            return
        for node in ast.walk(statement):
            name = _OPERATORS.get(type(node.op), "") if isinstance(node, ast.BinOp) else ""
            name = common_call(last_name(node.func)) if isinstance(node, ast.Call) else name
            if name and name == common_call(found[1]):
                for inner in inner_expressions(node):
                    change = Change("unwrap", node, found[1], None, inner)
                    yield from self._written(source, Match(0.0), [change], _LINES)

    def _swapped(self) -> Iterator[Proposal]:
        """Yield a function and an operator of the candidate's line in the other order, where the cause names both."""
        found = _OTHER_ORDER.search(self._fault.words)
        source, statement = self._project.statement_at(self.lines.candidate)
        if found is None or found[1] != found[4] or found[2] != found[3] or source is None or statement is None:
            return
        names = {common_call(found[1]), common_call(found[2])}
        texts: list[tuple[ast.expr, str]] = []
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
                inner, head = node.args[0], source.code(node.func)
                if isinstance(inner, ast.BinOp) and names == {_OPERATORS.get(type(inner.op)), _called(node)}:
                    sides, sign = [source.code(each) for each in (inner.left, inner.right)], _SIGNS[type(inner.op)]
                    texts += [
                        (node, f"{head}({sides[0]}) {sign} {sides[1]}"),
                        (node, f"{sides[0]} {sign} {head}({sides[1]})"),
                    ]
            if isinstance(node, ast.BinOp):
                for call, other in permutations((node.left, node.right)):
                    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
                        continue
                    if names == {_OPERATORS.get(type(node.op)), _called(call)}:
                        sides = [source.code(each) for each in (call.args[0], other)]
                        sides = sides if call is node.left else sides[::-1]
                        texts.append((node, f"{source.code(call.func)}({sides[0]} {_SIGNS[type(node.op)]} {sides[1]})"))
        for node, text in texts:
            around = source.parents.get(node)
            whole = f"({text})" if isinstance(around, (ast.BinOp, ast.UnaryOp, ast.Attribute)) else text
            start, end = source.span(node)
            words = f"`{found[3]}` comes before `{found[4]}`"
            yield Proposal((Edit(source.file, start, end, whole),), words, _LINES - 0.1)

    def _from_sources(self) -> Iterator[Proposal]:
        """Yield what statements of the reference's own files say of the candidate's that are most like them."""
        matcher = Matcher(self._fault.frameworks)
        sides = [_statements(project) for project in (self._fault.reference_code.without(self._project), self._project)]
        best: list[dict[ast.AST, tuple[float, ast.AST, Match]]] = [{}, {}]
        for _, reference in sides[0]:
            for _, own in sides[1]:
                if type(reference) is not type(own):
                    continue
                match = matcher.statement(reference, own)
                cost = match.cost + _OTHER_NAME * _other_names(reference, own, match)
                for k, (node, other) in enumerate(((reference, own), (own, reference))):
                    if node not in best[k] or cost < best[k][node][0]:
                        best[k][node] = (cost, other, match)
        for source, own in sides[1]:
            cost, other, match = best[1].get(own, (0.0, own, Match(0.0)))
            if match.changes and match.cost <= _NEAR and best[0][other][1] is own:
                values = [each for each in match.changes if each.kind != "whole"]
                yield from self._written(source, match, values, _OTHERS + 0.1 * cost)

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _input(self) -> Iterator[Proposal]:
        """Yield changes of the constants by which inputs are normalised, computed from the recorded inputs."""
        found = _OF_INPUT.search(self._fault.words) if self._fault.kind.startswith("input_") else None
        if found is None:
            yield from self._normalised_by_channel()
            return
        factor, offset = float(found[1] or 1.0), float(found[2] or 0.0)
        if not factor:
            return
        for source in self._project:
            for node in source.nodes:
                if isinstance(node, ast.BinOp):
                    yield from self._normalised(source, node, factor, offset)

    def _normalised_by_channel(self) -> Iterator[Proposal]:
        """Yield new constants of ``(x - m) / s`` with a number for each channel."""
        found = _BY_CHANNEL.search(self._fault.words) if self._fault.kind.startswith("input_") else None
        pairs = [] if found is None else [(float(f), float(o)) for f, o in _CHANNEL.findall(found[1])]
        rows = [
            (source, node)
            for source in self._project
            for node in source.nodes
            if pairs and isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) == len(pairs)
        ]
        vectors = [
            (source, node, [number_of(each) or 0.0 for each in node.elts])
            for source, node in rows
            if all(number_of(each) is not None for each in node.elts)
        ]
        for (source, means, shifts), (other, scales, divisors) in permutations(vectors[:4], 2):
            # The candidate's (x - m) / s is f times the reference's, plus o.
            new = [shift + offset * divisor for shift, divisor, (_, offset) in zip(shifts, divisors, pairs)]
            edits = [_rewritten(source, means, new)]
            if any(factor != 1.0 for factor, _ in pairs):
                edits.append(
                    _rewritten(other, scales, [divisor * factor for divisor, (factor, _) in zip(divisors, pairs)])
                )
            yield Proposal(tuple(edits), "the input is normalised with the reference's constants", _LINES - 0.1)

    def _normalised(self, source: Source, node: ast.BinOp, factor: float, offset: float) -> Iterator[Proposal]:
        """Yield new constants of ``(x - m) / s``, ``x * k``, ``x / k`` and ``x - m``.

        Args:
            source: the file.
            node: the expression.
            factor, offset: the candidate's input is the reference's, times the factor, plus the offset.
        """
        inner = node.left
        constants: list[tuple[ast.expr, float]] = []
        if isinstance(node.op, (ast.Div, ast.Mult)):
            scale = self._number(source, node.right)
            if scale is None or not scale:
                return
            divided = isinstance(node.op, ast.Div)
            divisor = scale if divided else 1.0 / scale
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, (ast.Sub, ast.Add)):
                shift = self._number(source, inner.right)
                if shift is None:
                    return
                sign = 1.0 if isinstance(inner.op, ast.Sub) else -1.0
                # The candidate's (x - m) / s is a (x - m') / s' + b.
                constants = [(inner.right, sign * (sign * shift + offset * divisor))]
            elif offset:
                return
            if factor != 1.0:
                if divided is False and abs(scale / factor - 1.0) < 1e-6:
                    (start, end), last = source.span(node), source.span(inner)[1]
                    yield Proposal(
                        (Edit(source.file, last, end, ""),), f"the input is not scaled by {scale:g}", _OTHERS - 1
                    )
                    return
                new = divisor * factor
                constants.append((node.right, new if divided else 1.0 / new))
        elif isinstance(node.op, (ast.Sub, ast.Add)) and factor == 1.0 and offset:
            shift = self._number(source, node.right)
            above = source.parents.get(node)
            if shift is None or (isinstance(above, ast.BinOp) and isinstance(above.op, (ast.Div, ast.Mult))):
                return
            constants = [(node.right, shift + (offset if isinstance(node.op, ast.Sub) else -offset))]
        edits = []
        for place, value in constants:
            holders = [(source, place)] if value_text(place) else self._project.definitions(source, place)
            if len(holders) != 1:
                return
            holder, literal = holders[0]
            start, end = holder.span(literal)
            edits.append(Edit(holder.file, start, end, _rounded(value)))
        if edits:
            shown = ", ".join(edit.text for edit in edits)
            yield Proposal(tuple(edits), f"the input is normalised with {shown}", _OTHERS)

    def _number(self, source: Source, node: ast.expr) -> float | None:
        own = number_of(node)
        if own is not None or isinstance(node, ast.Constant):
            return own
        values = self._project.definitions(source, node) if isinstance(node, (ast.Name, ast.Attribute)) else []
        return number_of(values[0][1]) if len(values) == 1 else None

    # -- places ------------------------------------------------------------------------------------------------------

    def _optimizer_steps(self) -> list[tuple[Source, ast.stmt, str]]:
        """Return the statements in which an optimizer steps, with the optimizer's name."""
        places: list[tuple[Source, ast.stmt, str]] = []
        for source in self._project:
            schedules = _schedules(source)
            for call in source.calls("step"):
                name = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""
                statement = source.statement_around(call)
                if name and name not in schedules and isinstance(statement, ast.Expr) and statement.value is call:
                    places.append((source, statement, name))
        frame = self._models.lines.candidate.get("@step")
        exact = [
            each for each in places if frame is not None and (each[0].file, each[1].lineno) == (frame.file, frame.line)
        ]
        near = [each for each in places if re.search("opt", each[2], re.IGNORECASE)]
        return exact or near or places

    def _optimizer_calls(self) -> list[tuple[Source, ast.Call]]:
        return [each for each in self._calls_in_project() if kind_of(last_name(each[1].func)) == "optimizer"]


def _statements(project: Project) -> Sequence[tuple[Source, ast.AST]]:
    found = [(source, node) for source in project for node in source.nodes]
    return [(source, node) for source, node in found if isinstance(node, _COMPARED)][:_STATEMENTS]


def _other_names(reference: ast.AST, candidate: ast.AST, match: Match) -> int:
    """Return the number of names that differ between two statements."""
    targets = [[last_name(each) for each in getattr(node, "targets", [])] for node in (reference, candidate)]
    return sum(_tail(one) != _tail(other) for one, other in match.names) + (targets[0] != targets[1])


def _tail(path: str) -> str:
    return path.rpartition(".")[2]


def _activation_of(words: str) -> str:
    """Return the function that a cause calls in words, such as ``leaky ReLU of slope 0.01``."""
    plain = words.lower().partition(" of ")[0]
    return "leaky_relu" if plain.startswith("leaky") else plain.rpartition(" ")[2]


def _parsed_call(fix: str) -> ast.Call | None:
    """Return the call that a fix of the diagnostic shows, such as ``LayerNorm(..., eps=1e-05)``."""
    try:
        tree = ast.parse(fix.partition("  #")[0].partition(", or ")[0].strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    node = tree.body[0] if len(tree.body) == 1 else None
    # An argument, such as `grad_clip=...`, is read as an assignment.
    return node.value if isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call) else None


def _parsed_value(text: str) -> ast.expr | None:
    """Return the number or option that a cause gives an argument in words; `None` for anything else."""
    try:
        value = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return value if value_text(value) else None


def _called(call: ast.Call) -> str:
    """Return the common name of a called function."""
    return common_call(last_name(call.func))


def _is_reversal(node: ast.AST) -> bool:
    """Return True if an index reverses an axis."""
    return any(isinstance(each, ast.Slice) and each.step is not None and number_of(each.step) == -1.0
               for each in ast.walk(node))  # fmt: skip


def _argument_of(key: str) -> str:
    """Return the argument of a key such as ``train.py:5#lr#0``, by its common name."""
    return common_argument(key.rpartition("#")[0].rpartition("#")[2])


def _may_be(own: str, name: str) -> bool:
    """Return True if a fix of a function or class may be about a call of the candidate's."""
    kinds = (kind_of(own), kind_of(name))
    if (own == "DataLoader") != (name == "DataLoader"):
        return False
    return bool(kinds[0]) and (
        common_call(own) == common_call(name) or (kinds[0] == kinds[1] and kinds[0] in ("optimizer", "loss", "clip"))
    )


def _is_about(key: str, fault: Fault) -> bool:
    """Return True if a line of a role may be about a fault."""
    kind, stage = fault.kind, fault.first.stage
    if key.startswith("optimizer."):
        return stage in ("update", "grad") or kind.startswith("clip")
    if key == "@clip":
        return stage == "grad" or kind.startswith("clip")
    if key == "@scheduler":
        return kind in ("learning_rate", "lr") or stage == "update"
    if key == "@loader":
        is_shape = fault.first.diff is not None and fault.first.diff.problem is not None
        return stage == "input" or kind in ("sizes", "labels") or is_shape
    if key.startswith("@loss:") or key in ("@total", "@backward"):
        return stage in ("loss", "backward", "grad")
    return key in ("@zero_grad", "@step") and stage in ("grad", "update")


def _frames(side: tuple[tuple[str, ...], object]) -> list[Frame]:
    """Return the lines of a fault's stack, the innermost one first."""
    stack, stacks = side
    known = [frame for each in stacks.values() for frame in each]  # type: ignore[attr-defined]
    frames = []
    for text in stack:
        file, _, line = text.partition(" ")[0].rpartition(":")
        if line.isdecimal():
            place = (file, int(line))
            frames.append(next((each for each in known if (each.file, each.line) == place), Frame(*place, "", "")))
    return frames


def _mapping(names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the candidate's name of each name of the reference, as far as it has one."""
    found: dict[str, set[str]] = {}
    for reference, candidate in names:
        found.setdefault(reference, set()).add(candidate)
    return {reference: next(iter(own)) for reference, own in found.items() if len(own) == 1}


def _words(change: Change, source: Source) -> str:
    name = f"`{change.name}`" if change.name else "the value"
    return {
        "value": f"{name} as the reference has it",
        "add": f"{name} is given",
        "remove": f"{name} is left out",
        "rename": f"{name} takes the place of `{last_name(getattr(change.node, 'func', change.node))}`",
        "unwrap": f"{name} around the expression is left out",
        "insert": f"`{last_name(getattr(change.reference, 'func', ast.Name('item')))}` is added",
        "wrap": f"{name} is around the expression",
        "whole": "the expression as the reference has it",
    }[change.kind]


def _schedules(source: Source) -> list[str]:
    """Return the variables and attributes that hold schedules of learning rates."""
    return [
        dotted(target)
        for node in source.nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if dotted(target) and kind_of(last_name(node.value.func)) == "schedule"
    ]


def _called_in_loops(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return the statements of loops that call a method of their own object."""
    statements = [
        statement
        for call in source.calls(function.name)
        if isinstance(call.func, ast.Attribute) and dotted(call.func.value) == "self"
        and (statement := source.statement_around(call)) is not None
    ]  # fmt: skip
    return [each for each in statements if isinstance(source.parents.get(each), (ast.For, ast.While))]


def _near(source: Source, node: ast.AST, step: ast.stmt) -> bool:
    return source.function(node) is source.function(step)


def _after(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements that follow a statement in its block."""
    parent = source.parents.get(statement)
    blocks = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    block = next((each for each in blocks if isinstance(each, list) and statement in each), [statement])
    return block[block.index(statement) + 1 :]


def _last_of_step(source: Source, step: ast.stmt) -> ast.stmt:
    """Return the last statement beside a step that still belongs to it: where gradients are zeroed."""
    zeroing = [each for each in _after(source, step) if any(
        isinstance(node, ast.Call) and last_name(node.func) in ("zero_grad", "clear_grad") for node in ast.walk(each)
    )]  # fmt: skip
    return zeroing[-1] if zeroing else step


def _last_before_backward(source: Source, statement: ast.stmt) -> ast.stmt:
    """Return the last statement beside one that still comes before the backward pass."""
    last = statement
    for each in _after(source, statement):
        calls = {last_name(node.func) for node in ast.walk(each) if isinstance(node, ast.Call)}
        if calls & {"backward", "zero_grad", "clear_grad", "step"}:
            break
        last = each
    return last


def _model_of(source: Source, step: ast.stmt) -> str:
    """Return the variable of the model in the function in which an optimizer steps; empty if not known."""
    scope = source.function(step) or source.tree
    parameters = [
        dotted(call.func.value) for call in source.calls("parameters") if isinstance(call.func, ast.Attribute)
    ]
    names = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name)}
    inside = [name for name in dict.fromkeys(parameters) if name.partition(".")[0] in names]
    if len(inside) == 1:
        return inside[0]
    trained = [
        dotted(call.func.value)
        for call in source.calls("train")
        if isinstance(call.func, ast.Attribute) and call in [*ast.walk(scope)]
    ]
    return trained[0] if len({*trained}) == 1 else ""


def _quoted(path: str) -> str:
    text = ascii(path)[1:-1]
    return f'"{text}"' if '"' not in text else ascii(path)


def _rewritten(source: Source, node: ast.Tuple | ast.List, values: list[float]) -> Edit:
    """Return the edit that gives a tuple or list other numbers."""
    start, end = source.span(node)
    signs = "[]" if isinstance(node, ast.List) else "()"
    is_bare = isinstance(node, ast.Tuple) and source.text[start] != "("
    inner = ", ".join(_rounded(value) for value in values)
    return Edit(source.file, start, end, inner if is_bare else f"{signs[0]}{inner}{signs[1]}")


def _rounded(value: float) -> str:
    """Return a number with the few digits that recorded inputs tell."""
    return number_text(float(f"{value:.4g}")) if abs(value) > 1e-6 else "0.0"
