"""Proposals that remove a fault: edits of the candidate's source, the most likely one first."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product

from padiff.compare.diagnose.kernels import activation_settings
from padiff.frameworks.catalog import LAYERS, OPTIMIZERS, number_text
from padiff.model.equivalents import common_kind
from padiff.records.diagnostic import brief_fault
from padiff.system.construction import definitions_in
from padiff.system.frames import Frame
from padiff_cli.fix.arithmetic import Arithmetic, UnknownError
from padiff_cli.fix.drafts import FIX, LINES, OTHERS, Drafts, called_function
from padiff_cli.fix.fault import Fault, nodes_at, parsed_call
from padiff_cli.fix.hyperparameters import parameter_groups, trainer_arguments
from padiff_cli.fix.insertions import insertions, literals, places, scaled_terms
from padiff_cli.fix.loop import LoopRules
from padiff_cli.fix.matching import Change, Match, Matcher, inner_expressions
from padiff_cli.fix.schedules import schedule_numbers
from padiff_cli.fix.source import (
    Edit,
    Project,
    Proposal,
    Source,
    last_name,
)
from padiff_cli.fix.vocabulary import (
    CONVERTING,
    KEYWORDS,
    TAKING_ACTIVATION,
    UNARY,
    argument_name,
    common_argument,
    common_call,
    kind_of,
    number_of,
    value_text,
    whole_name,
)

# Largest cost of two lines that are compared, and of lines that are searched for: others are other lines. Chosen.
_ALIKE, _NEAR = 6.0, 3.0
_LAYER_OF = {"interpolate": "Upsample"}
_OF_MATH = re.compile(rf"\bmath\.(?:{'|'.join(name for name in dir(math) if name[0] != '_')})\b")
# Functions that take a class and make none of its objects, or give it arguments already.
_OF_CLASSES = ("isinstance", "issubclass", "partial")
# The word at the end, and at the start, of a text: a name with its value.
_WORD_END, _WORD_START = re.compile(r"[\w.=]*$"), re.compile(r"[\w.]*")
_IDENTIFIER, _TEXT = re.compile(r"[A-Za-z_]\w*"), re.compile(r"""["'][^"']*["']""")
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}
# Cost of a name that differs, where statements are searched for those most like them.
_OTHER_NAME = 0.5
# Statements that are compared where the reference's files are at hand, and their largest number.
_COMPARED, _STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.For), 300
# Largest number of places of a number, and of numbers that only the reference has. Each is a run.
_NUMBER_PLACES, _OTHER_NUMBERS = 3, 3
# Numbers that say nothing by themselves.
_COMMON = frozenset((-1.0, 0.0, 1.0, 2.0))


class Rules(Drafts):
    """Writes proposals for one fault of a project."""

    def proposals(self) -> list[Proposal]:
        """Return proposals without duplicates, the most likely one first."""
        found = [
            *self._shown(),
            *self._from_fix(),
            *self._from_lines(),
            *LoopRules(self._fault, self._project).proposals(),
            *self._activation(),
            *self._elsewhere(),
            *self._numbers(),
            *self._loss_function(),
            *self._arguments(),
            *self._surplus(),
            *self._swapped(),
            *self._missing_activation(),
            *self._detached(),
            *self._from_sources(),
            *self._other_numbers(),
            *insertions(self._fault, self._project),
            *schedule_numbers(self._fault, self._project),
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

    def _shown(self) -> Iterator[Proposal]:
        """Yield the edit that the verdict shows, if the new line is made of names that the old line or the catalog has,
        of further names of the file that it does not call, of functions of `math`, of numbers, and of no other texts
        than words and the file's.
        """
        fix = brief_fault(self._first, self._models).fix
        source = None if fix is None or fix.file is None else self._project.get(fix.file)
        if fix is None or source is None or not fix.line or not fix.old or not fix.new or "# " in fix.new:
            return
        line, place = source.line(fix.line), source.line_start(fix.line)
        names = {*_IDENTIFIER.findall(fix.old), *KEYWORDS, *CONVERTING, "True", "False", "None", "true", "false"}
        names |= {name.lower() for classes in OPTIMIZERS.values() for name in classes}  # by which a factory chooses
        new = _OF_MATH.sub("0", fix.new)
        others = [each for each in _IDENTIFIER.finditer(new) if each[0] not in names and not kind_of(each[0])]
        may_be_written = all(each[0] in source.names and new[each.end() :][:1] != "(" for each in others)
        texts = {*_TEXT.findall(fix.new)} - {*_TEXT.findall(fix.old)}
        may_be_written &= "\\" not in fix.new and all(
            text[1:-1].isidentifier() or text in source.text for text in texts
        )
        if line.count(fix.old) == 1 and may_be_written:
            start = source.text.index(fix.old, place)
            edits = [Edit(source.file, start, start + len(fix.old), fix.new)]
            if new != fix.new and source.modules.get("math") != "math":
                edits.append(source.import_edit("math"))
            yield Proposal(tuple(edits), _changed_words(fix.old, fix.new), FIX - 0.1)

    def _from_fix(self) -> Iterator[Proposal]:
        """Yield the fix of the cause, those of settings that differ at its stage, and the first of each together."""
        settings = [each.fix for each in self._fault.settings if each.changes and each.stage == self._first.stage]
        together: list[Proposal] = []
        for k, fix in enumerate(dict.fromkeys([self._fault.fix, *settings])):
            proposals = [each for part in fix.split("; ") for each in self._of_call(part, OTHERS - 1 if k else FIX)]
            together += sorted(proposals, key=lambda each: each.weight)[:1]
            yield from proposals
        if len(together) > 1:
            edits = [edit for each in together for edit in each.edits]
            yield Proposal(tuple(edits), "all settings as the reference has them", FIX + 0.9)

    def _of_call(self, fix: str, weight: float) -> Iterator[Proposal]:
        """Yield what a call in the words of a fix changes."""
        call = parsed_call(fix)
        if call is not None and kind_of(last_name(call.func)) == "layer":
            yield from self._as_partial(call, weight)
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

    def _as_partial(self, fix: ast.Call, weight: float) -> Iterator[Proposal]:
        """Yield the arguments of a fix for a class that is named where it is chosen, and called by a variable."""
        arguments = [f"{each.arg}={text}" for each in fix.keywords if (text := value_text(each.value))]
        for source in self._project if arguments and len(arguments) == len(fix.keywords) else ():
            for node in source.nodes:
                above = source.parents.get(node)
                is_called = isinstance(above, (ast.Attribute, ast.ClassDef)) or (
                    isinstance(above, ast.Call) and (above.func is node or last_name(above.func) in _OF_CLASSES)
                )
                if (
                    isinstance(node, (ast.Name, ast.Attribute))
                    and last_name(node) == last_name(fix.func)
                    and not is_called
                ):
                    head = source.spelled("functools.partial")
                    text = f"{head or 'functools.partial'}({source.code(node)}, {', '.join(arguments)})"
                    edits = [
                        Edit(source.file, *source.span(node), text),
                        *([] if head else [source.import_edit("functools")]),
                    ]
                    yield Proposal(tuple(edits), f"`{source.code(node)}` is given {', '.join(arguments)}", weight + 0.1)

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
            calls = {
                each: source for source, each in self._project.catalog_calls() if _may_be(last_name(each.func), name)
            }
        return [(source, node) for node, source in calls.items()][:4]

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
            # Arguments of one call with other values say more than calls that differ otherwise.
            is_setting = all(change.kind == "value" and change.name for change in best[0].changes)
            yield from self._written(
                source, best[0], list(best[0].changes), min(weight, LINES) if is_setting else weight
            )

    def _pairs(self) -> Iterator[tuple[ast.AST, Source, int, float]]:
        """Yield nodes of the reference with the candidate's lines that answer to them, and a weight."""
        lines = self._models.lines
        pairs: list[tuple[Frame | None, Frame | None, float]] = [(*self.lines, LINES)]
        stacks = self._first.stacks.zip(self._models.stacks).map(_frames)
        pairs += [(one, other, LINES + 1) for one, other in zip(*stacks)]
        layers = (self._first.reference or "", self._first.candidate or "")
        pairs.append((lines.reference.get(layers[0]), lines.candidate.get(layers[1]), LINES + 1))
        while all(layers) and "." in layers[0] + layers[1]:
            layers = (layers[0].rpartition(".")[0], layers[1].rpartition(".")[0])
            pairs.append((lines.reference.get(layers[0]), lines.candidate.get(layers[1]), LINES + 1.5))
        for key, frame in lines.reference.items():
            if key in lines.candidate and _is_about(key, self._fault):
                pairs.append((frame, lines.candidate[key], LINES + 2))
                # Arguments of the call that stand on other lines.
                head, own = (f"{each.file}:{each.line}#" for each in (frame, lines.candidate[key]))
                pairs += [
                    (value, defined, LINES + 2.5)
                    for name, value in lines.reference.items()
                    for other_name, defined in lines.candidate.items()
                    if name.startswith(head)
                    and other_name.startswith(own)
                    and _argument_of(name) == _argument_of(other_name)
                ]
                pairs += [
                    (value, lines.candidate[key], LINES + 3)
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
            yield from self._written(source, match, list(match.changes), LINES + 1.5)

    def _activation(self) -> Iterator[Proposal]:
        """Yield the reference's activation in the place of the candidate's, where the cause names both."""
        names = self._fault.values if self._fault.kind == "activation" else None
        if names is None:
            return
        own, other = _activation_of(names.candidate), _activation_of(names.reference)
        yield from self._activation_name(own, other)
        # The calls at the fault; elsewhere, if the fault's line calls a container of layers.
        near = self._project.statement_at(self.lines.candidate)[1]
        name = common_call(own).replace("_", "")
        calls = [each for each in self._project.catalog_calls() if called_function(each[1]).replace("_", "") == name]
        here = [each for each in calls if near is not None and each[1] in ast.walk(near)]
        for source, node in here or calls:
            is_layer = kind_of(last_name(node.func)) == "layer"
            if common_call(own) == common_call(other):
                yield from self._settings_of(source, node, names.reference)
                continue
            layers = (
                each
                for each in LAYERS[self._framework]
                if common_kind(each.lower()) == common_kind(other.replace("_", ""))
            )
            name = min(layers, default="") if is_layer else other
            if name and kind_of(name):
                changes = [Change("rename", node, name, node)]
                if own == "leaky_relu" or (own == "gelu" and other != "gelu"):
                    changes += [
                        Change("remove", each) for each in (*(node.args if is_layer else node.args[1:]), *node.keywords)
                    ]
                for proposal in self._written(source, Match(0.0), changes, LINES):
                    yield replace(proposal, weight=LINES - 0.2)

    def _activation_name(self, candidate: str, reference: str) -> Iterator[Proposal]:
        """Yield the reference's activation where a text names the candidate's, and where a layer takes such a name."""
        for source in self._project:
            for node in source.nodes:
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                if {text, reference} <= UNARY and common_call(text) == common_call(candidate):
                    edit = Edit(source.file, *source.span(node), source.code(node).replace(text, reference))
                    yield Proposal((edit,), f"the activation is {reference}", LINES - 0.1)
        for source, call in self._project.calls(*TAKING_ACTIVATION):
            if not any(keyword.arg == "activation" for keyword in call.keywords):
                change = Change("add", call, "activation", ast.Constant(reference))
                yield from self._written(source, Match(0.0), [change], LINES - 0.4)

    def _settings_of(self, source: Source, call: ast.Call, function: str) -> Iterator[Proposal]:
        """Yield the number of a function in words, or the settings of the layer that a cause names, as arguments of a
        call of the same function.
        """
        paths = re.findall(r"`([^`]+)`", self._fault.words)
        layer = next((each for each in self._models.layers.reference if each.path in paths), None)
        # As settings of layers, an activation's are counted as torch does.
        values = activation_settings(function) or ({} if layer is None else layer.settings)
        keywords = [
            ast.keyword(name, ast.Constant(value))
            for name, value in values.items()
            if isinstance(value, (int, float, str))
        ]
        reference = ast.Call(call.func, [ast.Constant(...)], keywords)
        match = Matcher(("torch", self._framework)).match(reference, call)
        yield from self._written(source, match, [each for each in match.changes if each.reference is not None], FIX)

    def _missing_activation(self) -> Iterator[Proposal]:
        """Yield the reference's activation around the candidate's line, or behind the layer that still agrees."""
        expected = "" if self._fault.values is None else self._fault.values.reference
        if self._fault.kind != "activation_missing" or not expected:
            return
        function = ast.Call(ast.Name(_activation_of(expected)), [ast.Name("x")], [])
        source, statement = self._project.statement_at(self.lines.candidate)
        if source is not None and isinstance(statement, (ast.Assign, ast.Return)) and statement.value is not None:
            change = Change("wrap", statement.value, expected, function, function.args[0])
            yield from self._written(source, Match(0.0), [change], LINES - 0.2)
        for own, _, place in list(places(self._fault, self._project))[:3]:
            # Around what the layer is given, or around the layer before it.
            change = Change("wrap", place, expected, function, function.args[0])
            yield from self._written(own, Match(0.0), [change], LINES - 0.1)
        partners = {each.reference: each.candidate for each in self._models.partners}
        before = self._models.lines.candidate.get(partners.get(self._first.last_agreeing, ""))
        source, statement = self._project.statement_at(before)
        kind = _activation_of(expected).replace("_", "")
        name = min(
            (each for each in LAYERS[self._framework] if common_kind(each.lower()) == common_kind(kind)), default=""
        )
        for node in ast.walk(statement) if statement is not None and name else ():
            is_item = source is not None and _is_item(source, node)
            if source is not None and before is not None and is_item and getattr(node, "lineno", 0) == before.line:
                change = Change("insert", node, "after", ast.Call(ast.Name(name), [], []))
                yield from self._written(source, Match(0.0), [change], LINES - 0.2)

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
                yield from self._written(source, Match(0.0), [change], LINES + 0.6)

    def _numbers(self) -> Iterator[Proposal]:
        """Yield the reference's number in the place of the candidate's, where the cause names both."""
        rows: list[list[Proposal]] = []
        for right, own in self._fault.numbers:
            rows.append([*self._number(right, own), *self._computed_number(right, own)])
            if len(self._fault.numbers) == 1:
                yield from rows[-1]
            elif own == 1.0:
                rows[-1] += scaled_terms(self._fault, self._project, right)
        # Several numbers are one fault, which is gone with all of them.
        for choice in product(*(sorted(row, key=lambda each: each.weight)[:2] for row in rows)) if rows[1:] else ():
            edits = tuple(edit for each in choice for edit in each.edits)
            yield Proposal(edits, "; ".join(each.words for each in choice), LINES - 0.2)

    def _number(self, right: float, own: float) -> Iterator[Proposal]:
        text = number_text(float(f"{right:.6g}")).removesuffix(".0")
        source, statement = self._project.statement_at(self.lines.candidate)
        weight = LINES + 0.7
        nodes = [] if source is None or statement is None else [(source, node) for node in ast.walk(statement)]
        places = []
        for each, node in nodes:
            if isinstance(node, ast.expr) and not isinstance(node, ast.Call):
                known = number_of(node) is not None
                places += [(each, node)] if known else self._project.definitions(each, node)
        remaining = [(each, node) for each, node, value in literals(self._project) if value == own not in _COMMON]
        remaining = remaining if len(remaining) <= _NUMBER_PLACES else []
        for k, (holder, value) in enumerate(dict.fromkeys([*places, *remaining])):
            number = number_of(value)
            if number is not None and abs(number - own) <= 1e-6 * abs(number):
                start, end = holder.span(value)
                new = number_text(float(text)) if "." in holder.code(value) else text
                more = 0.0 if k < len(places) else 0.5
                yield Proposal((Edit(holder.file, start, end, new),), f"the number is {new}", weight + more)

    def _computed_number(self, right: float, own: float) -> Iterator[Proposal]:
        """Yield the values of literals with which an expression of the function around the line has the reference's
        number: also as an argument of a single call of the function, where the literal is a default.
        """
        source, statement = self._project.statement_at(self.lines.candidate)
        scope = None if source is None or statement is None else source.function(statement)
        for node in ast.walk(scope) if scope is not None else ():
            if source is None or scope is None or not isinstance(node, ast.BinOp):
                continue
            arithmetic = Arithmetic(self._project)
            try:
                is_it = math.isclose(arithmetic.evaluate(source, node), own, rel_tol=1e-6)
                solutions = [*arithmetic.solved(source, node, right)] if is_it else []
            except (UnknownError, TypeError):
                continue
            for holder, literal, value in solutions:
                text = number_text(value)
                edit = Edit(holder.file, *holder.span(literal), text)
                yield Proposal((edit,), f"the number is {text}, which gives {right:g}", LINES + 0.8)
                names = [name for _, name, default in definitions_in(scope) if default is literal]
                for place, call in self._project.calls(scope.name)[:_NUMBER_PLACES] if names else ():
                    if not any(each.arg == names[0] for each in call.keywords):
                        end = place.span(call)[1] - 1
                        edit = Edit(place.file, end, end, f"{', ' * bool(call.args or call.keywords)}{names[0]}={text}")
                        yield Proposal((edit,), f"`{names[0]}` is given", LINES + 0.75)

    def _loss_function(self) -> Iterator[Proposal]:
        """Yield the reference's loss function of the catalog, for a loss that the candidate writes by hand."""
        if self._first.stage not in ("loss", "backward"):
            return
        frames = [frame for key, frame in self._models.lines.reference.items() if key.startswith(("@loss:", "@total"))]
        nodes = [self._reference_node(each) for each in filter(None, [self.lines.reference, *frames])]
        calls = [
            each
            for node in filter(None, nodes)
            for each in ast.walk(node)
            if isinstance(each, ast.Call) and kind_of(last_name(each.func)) == "loss" and len(each.args) > 1
        ]
        source, statement = self._project.statement_at(self.lines.candidate)
        own = getattr(statement, "value", None)
        if not calls or source is None or not isinstance(own, ast.expr):
            return
        if any(isinstance(each, ast.Call) and kind_of(last_name(each.func)) == "loss" for each in ast.walk(own)):
            return
        differences = [each for each in ast.walk(own) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub)]
        pairs = [(each.left, each.right) for each in differences]
        pairs += [tuple(each.args) for each in ast.walk(own) if isinstance(each, ast.Call) and len(each.args) == 2]  # type: ignore[misc]
        name = last_name(calls[0].func)
        name = "smooth_l1_loss" if (name, self._framework) == ("huber_loss", "paddle") else name
        whole = whole_name(self._framework, name)
        arguments = [self._loss_argument(each) for each in calls[0].keywords]
        if not whole or not all(arguments):
            return
        for pair in pairs[:2]:
            text = ", ".join([*map(source.code, pair), *arguments])
            edit = Edit(source.file, *source.span(own), f"{source.spelled(whole) or whole}({text})")
            yield Proposal((edit,), f"the loss is `{name}`", LINES - 0.1)

    def _loss_argument(self, keyword: ast.keyword) -> str:
        """Return an argument of the reference's loss as code of the candidate; empty if its value is not known."""
        text = value_text(keyword.value)
        for key, frame in self._models.lines.reference.items() if not text else ():
            defined = self._reference_node(frame) if f"#{keyword.arg}#" in key else None
            value = getattr(defined, "value", None)
            text = text or (value_text(value) if isinstance(value, ast.expr) else "")
        common = common_argument(str(keyword.arg))
        return f"{argument_name(self._framework, common, str(keyword.arg))}={text}" if text else ""

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
                weight = LINES - 0.1 if len(values) == len(only[1]) == 1 else OTHERS + 0.5
                yield Proposal((Edit(source.file, start, end, text),), words, weight)

    def _arguments(self) -> Iterator[Proposal]:
        """Yield the reference's arguments of a call that the cause names: on the candidate's line, then elsewhere."""
        sides = self._fault.calls
        near = self._project.statement_at(self.lines.candidate)[1]
        nodes = set() if near is None else {*ast.walk(near)}
        for function, arguments in sides.reference:
            is_called = function in [each for each, _ in sides.candidate]
            names = [common_call(each) for each in (function, _LAYER_OF.get(function, function))]
            keywords = [ast.keyword(name, value) for name, each in arguments.items() if (value := _plain_value(each))]
            for source, call in self._project.catalog_calls() if keywords else ():
                if common_call(last_name(call.func)) not in names:
                    continue
                reference = ast.Call(call.func, [ast.Constant(...)], keywords)
                match = Matcher((self._fault.frameworks[0], self._framework)).match(reference, call)
                kinds = ("value", "add") if is_called else ("value",)
                changes = [each for each in match.changes if each.kind in kinds]
                yield from self._written(source, match, changes, LINES - 0.1 * (call in nodes))

    def _surplus(self) -> Iterator[Proposal]:
        """Yield the candidate's line, or that of a layer that the cause names, without a call or operator of it."""
        values = self._fault.values if self._fault.kind.endswith("_added") else None
        surplus = "" if values is None else values.candidate
        if not surplus or not isinstance(surplus, str):
            return
        function = _activation_of(surplus)
        kind = common_kind(function.replace("_", ""))
        constructed = map(self._models.lines.candidate.get, re.findall(r"`([^`]+)`", self._fault.words))
        for frame in dict.fromkeys(filter(None, (self.lines.candidate, *constructed))):
            source, statement = self._project.statement_at(frame)
            if source is None or statement is None:
                continue
            for node in ast.walk(statement):
                name = _OPERATORS.get(type(node.op), "") if isinstance(node, ast.BinOp) else ""
                name = last_name(node.func) if isinstance(node, ast.Call) else name
                if _is_item(source, node) and common_kind(name.lower()) == kind:
                    yield from self._written(source, Match(0.0), [Change("remove", node, surplus)], LINES)
                elif name and common_call(name) == common_call(function):
                    for inner in inner_expressions(node):
                        change = Change("unwrap", node, surplus, None, inner)
                        yield from self._written(source, Match(0.0), [change], LINES)

    def _swapped(self) -> Iterator[Proposal]:
        """Yield a function and an operator of the candidate's line in the other order, where the cause names both."""
        orders = self._fault.calls.map(lambda side: [common_call(name) for name, _ in side])
        source, statement = self._project.statement_at(self.lines.candidate)
        first, last = orders.reference if len(orders.reference) == 2 else ("", "")
        if first == last or orders.candidate != [last, first] or source is None or statement is None:
            return
        names = {first, last}
        texts: list[tuple[ast.expr, str]] = []
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
                inner, head = node.args[0], source.code(node.func)
                if isinstance(inner, ast.BinOp) and names == {_OPERATORS.get(type(inner.op)), called_function(node)}:
                    sides, sign = [source.code(each) for each in (inner.left, inner.right)], _SIGNS[type(inner.op)]
                    texts += [
                        (node, f"{head}({sides[0]}) {sign} {sides[1]}"),
                        (node, f"{sides[0]} {sign} {head}({sides[1]})"),
                    ]
            if isinstance(node, ast.BinOp):
                for call, other in permutations((node.left, node.right)):
                    if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
                        continue
                    if names == {_OPERATORS.get(type(node.op)), called_function(call)}:
                        sides = [source.code(each) for each in (call.args[0], other)]
                        sides = sides if call is node.left else sides[::-1]
                        texts.append((node, f"{source.code(call.func)}({sides[0]} {_SIGNS[type(node.op)]} {sides[1]})"))
        for node, text in texts:
            around = source.parents.get(node)
            whole = f"({text})" if isinstance(around, (ast.BinOp, ast.UnaryOp, ast.Attribute)) else text
            start, end = source.span(node)
            words = f"`{first}` comes before `{last}`"
            yield Proposal((Edit(source.file, start, end, whole),), words, LINES - 0.1)

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
                yield from self._written(source, match, values, OTHERS + 0.1 * cost)


def _statements(project: Project) -> Sequence[tuple[Source, ast.AST]]:
    found = [(source, node) for source in project for node in source.nodes]
    return [(source, node) for source, node in found if isinstance(node, _COMPARED)][:_STATEMENTS]


def _other_names(reference: ast.AST, candidate: ast.AST, match: Match) -> int:
    """Return the number of names that differ between two statements."""
    targets = [[last_name(each) for each in getattr(node, "targets", [])] for node in (reference, candidate)]
    return sum(_tail(one) != _tail(other) for one, other in match.names) + (targets[0] != targets[1])


def _tail(path: str) -> str:
    return path.rpartition(".")[2]


def _is_item(source: Source, node: ast.AST) -> bool:
    """Return True for an item of a list, or of a `Sequential`."""
    above = source.parents.get(node)
    return isinstance(above, ast.List) or (isinstance(above, ast.Call) and last_name(above.func) == "Sequential")


def _activation_of(words: str) -> str:
    """Return the function that a cause calls in words, such as ``leaky ReLU of slope 0.01``."""
    plain = words.lower().partition(" of ")[0]
    return "leaky_relu" if plain.startswith("leaky") else plain.rpartition(" ")[2]


def _plain_value(value: object) -> ast.expr | None:
    """Return a number or an option that a cause gives an argument as code; `None` for anything else."""
    node = ast.Constant(value) if isinstance(value, (bool, int, float, str)) else None
    return node if node is not None and value_text(node) else None


def _argument_of(key: str) -> str:
    """Return the argument of a key such as ``train.py:5#lr#0``, by its common name."""
    return common_argument(key.rpartition("#")[0].rpartition("#")[2])


def _changed_words(old: str, new: str) -> str:
    """Return what becomes of a line, in words: the part from the first to the last character that changes."""
    pairs = zip(old, new)
    start = next((k for k, (before, after) in enumerate(pairs) if before != after), min(len(old), len(new)))
    rest = min(len(old), len(new)) - start
    end = next((k for k in range(rest) if old[-1 - k] != new[-1 - k]), rest)
    start = start - len(_WORD_END.search(old[:start])[0])  # type: ignore[index]
    end = end - len(_WORD_START.match(old[len(old) - end :])[0])  # type: ignore[index]
    before, after = (text[start : len(text) - end].strip(" ,") for text in (old, new))
    if not before or not after:
        return f"`{before or after}` is {'left out' if before else 'added'}"
    return f"`{before}` becomes `{after}`"


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
    if key.startswith("@scheduler"):
        return kind in ("learning_rate", "lr") or stage == "update"
    if key == "@loader":
        is_shape = fault.first.diff is not None and fault.first.diff.problem is not None
        return stage == "input" or kind in ("sizes", "labels") or is_shape
    if key.startswith("@loss:") or key in ("@total", "@backward"):
        return stage in ("loss", "backward", "grad")
    return key.startswith(("@zero_grad", "@step")) and stage in ("grad", "update")


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
