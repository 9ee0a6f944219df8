"""What is new in a step, as a text for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.records import Report, Standing, count_text

# Further faults that a text tells of; so many of a training are never seen.
_FURTHER = 20
_Place = tuple[Any, ...]
#: What is said when a step that was recorded in full proves the cause of a first diff that sketches showed.
CAUSE_KNOWN = "its cause is known now"


class News:
    """The first diff, once that others follow from it, further faults: each text holds those before it, too.

    TensorBoard keeps ten texts of a tag, the last one for sure: that one tells all.
    """

    def __init__(self) -> None:
        self._place: _Place | None = None
        self._follows = False
        self._reported: list[str] = []

    def text(self, report: Report, differs: bool) -> str:
        """All that is known by a step, in Markdown; empty where that brings nothing new.

        Args:
            differs: whether a step before it has a diff.
        """
        first, new = report.first_diff, []
        if report.explained is not None:
            new.append(f"{CAUSE_KNOWN}: **{report.explained.message}**")
        if first is None:
            self._reported += new
            return "\n\n".join(self._reported) if new else ""
        place = first.stage, first.reference, first.candidate, first.slot
        # A process that was started again has not seen the first one.
        follows = first.standing is Standing.FOLLOWS or (first.standing is Standing.FIRST and differs)
        if not follows and first.standing is Standing.FIRST:
            more = f"\n\n{count_text(report)} in step {first.step}." if len(report.failed) > 1 else ""
            new.append(f"{Standing.FIRST}: **{first.message}**{more}")
        elif follows and place != self._place and not self._follows:
            self._follows = True
            step = report.coverage.steps[0]
            new.append(f"{Standing.FOLLOWS}: {count_text(report)} in step {step}, as in those after it.")
        self._place = place
        if len(self._reported) < _FURTHER:
            new += [f"{Standing.NEW}: **{one.message}**" for one in report.independent]
        self._reported += new
        return "\n\n".join(self._reported) if new else ""

    def learn(self, line: Mapping[str, Any]) -> None:
        """Take over what was said of a step that another process wrote, from its line."""
        first, standings = line.get("first_diff"), {one: one.name.lower() for one in Standing}
        if first:
            standing = first.get("standing", standings[Standing.FIRST])
            place = tuple(first.get(key) for key in ("stage", "reference", "candidate", "slot"))
            if standing == standings[Standing.FIRST] and not self._reported:
                self._reported.append(f"{Standing.FIRST}: **{first.get('message', '')}**")
            elif standing == standings[Standing.FOLLOWS] and place != self._place and not self._follows:
                self._follows = True
                self._reported.append(f"{Standing.FOLLOWS}: as in step {line['step']}, so in those after it.")
            self._place = place
        if len(self._reported) < _FURTHER:
            self._reported += [f"{Standing.NEW}: **{one['message']}**" for one in line.get("independent", ())]
