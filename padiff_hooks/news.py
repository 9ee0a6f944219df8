"""Texts for TensorBoard about new differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from padiff.records import Report, Standing, count_text
from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import diagnostic_text
from padiff.report_markdown import code_block
from padiff.system.terminal import printable

# Limit on the further faults in a text; no training has shown so many.
_FURTHER = 20
# Width of a diagnostic, in columns, and largest size of one in a line, in characters.
_WIDE, _LONGEST = 96, 20_000
_Place = tuple[Any, ...]
#: Heading for the cause of a first diff that sketches showed and that a step recorded in full proves later.
CAUSE_KNOWN = "its cause is known now"


class News:
    """Texts on the first diff, the first step that follows from it, and further faults.

    Each text repeats the texts before it, because TensorBoard keeps ten texts of a tag and always the last one.
    """

    def __init__(self) -> None:
        #: The text of the first diff, once this process has reported it.
        self.first_text = ""
        self._place: _Place | None = None
        self._follows = False
        #: True if no tensor has shown the first diff, a difference of settings.
        self._is_declared = False
        self._reported: list[str] = []

    def markdown(self, report: Report, differs: bool) -> str:
        """Return all faults up to a step in Markdown; empty if the step adds nothing new.

        Args:
            report: report of the step.
            differs: True if an earlier step has a diff.
        """
        first, new = report.first_diff, []
        if report.explained is not None:
            new.append(f"{CAUSE_KNOWN}: {report.explained.message}")
        if first is None:
            self._reported += new
            return "\n\n".join(self._reported) if new else ""
        place = first.stage, first.reference, first.candidate, first.slot
        # A restarted process has not seen the first diff.
        follows = first.standing is Standing.FOLLOWS or (first.standing is Standing.FIRST and differs)
        is_shown = self._is_declared and first.diff is not None
        if is_shown or (not follows and first.standing is Standing.FIRST):
            self._is_declared = first.diff is None
            more = f"\n\n{count_text(report)} in step {first.step}." if len(report.failed) > 1 else ""
            block = diagnostic_text(diagnostic_of(replace(report, independent=())), _WIDE)
            self.first_text = "\n".join(code_block(block.split("\n"), "text")) + more
            new.append(self.first_text)
        elif follows and first.diff is not None and place != self._place and not self._follows:
            self._follows = True
            step = report.coverage.steps[0]
            new.append(f"{Standing.FOLLOWS}: {count_text(report)} in step {step}, as in those after it.")
        self._place = place
        if len(self._reported) < _FURTHER:
            new += [f"{Standing.NEW}: {fault.message}" for fault in report.independent]
        self._reported += new
        return "\n\n".join(self._reported) if new else ""

    def learn(self, line: Mapping[str, Any]) -> None:
        """Read the faults that an earlier process reported of a step from its line of ``diffs.jsonl``."""
        first, standings = line.get("first_diff"), {item: item.name.lower() for item in Standing}
        if first:
            standing = first.get("standing", standings[Standing.FIRST])
            place = tuple(first.get(key) for key in ("stage", "reference", "candidate", "slot"))
            if standing == standings[Standing.FIRST] and not self._reported:
                text = line.get("text")  # lines of an older padiff have none
                known = isinstance(text, str) and len(text) <= _LONGEST
                message = f"{Standing.FIRST}: {first.get('message', '')}"
                self._reported.append(printable(str(text), lines=True) if known else message)
            elif standing == standings[Standing.FOLLOWS] and place != self._place and not self._follows:
                self._follows = True
                self._reported.append(f"{Standing.FOLLOWS}: as in step {line['step']}, so in those after it.")
            self._place, self._is_declared = place, not first.get("site")
        if len(self._reported) < _FURTHER:
            self._reported += [f"{Standing.NEW}: {fault['message']}" for fault in line.get("independent", ())]
