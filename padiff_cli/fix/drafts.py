"""Proposals made of the differences of two expressions: how a change of a line becomes edits of the files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from padiff.records import Both
from padiff.records.diagnostic import named_at
from padiff.system.construction import definitions_in
from padiff.system.frames import Frame
from padiff_cli.fix.fault import Fault, parsed_line
from padiff_cli.fix.matching import Change, Match, Matcher, UnwritableError, Writer
from padiff_cli.fix.source import (
    Edit,
    Project,
    Proposal,
    Source,
    dotted,
    last_name,
)
from padiff_cli.fix.vocabulary import (
    argument_name,
    common_argument,
    common_call,
    kind_of,
    number_of,
    value_text,
)

#: A number, as causes show it.
SIGNED = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
#: Ranks of proposals: a cause's own fix, the two lines, calls of a step, other lines.
FIX, LINES, CALLS, OTHERS = 0.0, 2.0, 1.0, 6.0


class Drafts:
    """Writes proposals for one fault of a project. A subclass writes those for a part of the causes."""

    def __init__(self, fault: Fault, project: Project) -> None:
        self._fault, self._project = fault, project
        self._first, self._models = fault.first, fault.models
        self._framework = fault.frameworks[1]
        self.lines: Both[Frame | None] = fault.lines

    def _reference_node(self, frame: Frame) -> ast.AST | None:
        own = self._fault.reference_code.get(frame.file)
        statement = None if own is None or not frame.is_line(own.line(frame.line)) else own.statement(frame.line)
        return parsed_line(frame.code) if statement is None else statement

    def _written(self, source: Source, match: Match, changes: list[Change], weight: float) -> Iterator[Proposal]:
        """Yield a proposal for each change, and one for all of them."""
        names = same_names(match.names)
        whole: list[Edit] = []
        for change in changes:
            more = 0.0 if change.name and named_at(self._fault.words, change.name) is not None else 0.3
            more += 1.0 if change.kind == "whole" else 0.0
            definitions = self._definitions(source, change)
            number = number_of(change.reference) if isinstance(change.reference, ast.expr) else None
            if number is not None and number in [number_of(node) for _, node in definitions]:
                continue  # it has the reference's value
            text = value_text(change.reference) if isinstance(change.reference, ast.expr) else ""
            defined = [
                Edit(place.file, *place.span(node), _spelled(text, place.code(node)))
                for place, node in definitions
                if text
            ]
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
            if dotted(node) in map(dotted, each.targets)
            and (
                called_function(each.value) == called_function(reference)
                or {kind_of(last_name(call.func)) for call in (each.value, reference)} == {"clip"}
            )
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


def _spelled(text: str, before: str) -> str:
    """Return a number with a point where the number in its place has one."""
    return f"{text}.0" if text.isdigit() and re.fullmatch(r"[-\d]+\.\d*", before) else text


def called_function(call: ast.Call) -> str:
    """Return the common name of a called function."""
    return common_call(last_name(call.func))


def same_names(names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the candidate's name of each name of the reference, as far as it has one."""
    names_by_name: dict[str, set[str]] = {}
    for reference, candidate in names:
        names_by_name.setdefault(reference, set()).add(candidate)
    return {reference: next(iter(partners)) for reference, partners in names_by_name.items() if len(partners) == 1}


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
