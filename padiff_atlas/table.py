"""Text of the atlas for a console, and as a Markdown page."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console

from padiff.compare.diagnose.known_differences import Atlas, AtlasRow

_METHOD = (
    'Written by `padiff atlas --markdown`: both calls of each row were run, and so was the call under "call it so", '
    "which agrees with the other side's. Called alike means what a person writes who ports line by line: the same "
    "arguments where both have them, else the defaults. All of it ran on a CPU, in float32 (optimizers: float64)."
)
_LEGEND = (
    "`nn`, `F` and `init` are `torch.nn`, `torch.nn.functional` and `torch.nn.init`, or `paddle.nn`, "
    "`paddle.nn.functional` and `paddle.nn.initializer`. A layer's weights are the same on both sides. Two values or "
    "shapes are torch's against paddle's: where they are furthest apart, behind the norm of the whole difference over "
    "that of torch's values (relative L2). Where there is a closed form, the table says which side agrees with it in "
    "float64. Random draws are compared by standard deviation and by the 99 % quantile of their size."
)


def difference_text(row: AtlasRow) -> str:
    """Return the difference of the two calls as text, e.g. ``paddle's is 0.833 times torch's``, or ``same``."""
    if not row.differs:
        return "same"
    torch, paddle = row.at
    if row.kind == "raises":
        sides = [f"{name} {result}" for name, result in (("torch", torch), ("paddle", paddle)) if result != "runs"]
        return ", ".join(sides)
    if row.kind == "shapes":
        return f"{torch} against {paddle}"
    if row.ratio is not None:
        return f"paddle's is {row.ratio:.4g} times torch's"
    far = "" if row.rel_l2 is None or math.isinf(row.rel_l2) else f"relative L2 {row.rel_l2:.2g}: "
    return f"{far}{torch} against {paddle}"


def mended_lines(row: AtlasRow) -> Iterator[tuple[str, str]]:
    """Yield pairs of a remark and a call that removes a difference; either can be empty."""
    if row.mended:
        yield "" if row.mended_agrees else "should agree and does not:", row.mended
    if row.mended_torch:
        doubt = "" if row.mended_torch_agrees else ", should agree and does not"
        yield f"{'or, ' if row.mended else ''}in torch{doubt}:", row.mended_torch
    if not row.mended and not row.mended_torch:
        yield "no call of either is known that agrees", ""


def print_atlas(atlas: Atlas, console: Console) -> None:
    """Print each difference with its calls on separate lines, for copying, and the number of differences."""
    for name in dict.fromkeys(row.group for row in atlas.rows if row.differs):
        console.rule(name, align="left")
        for row in atlas.rows:
            if row.group == name and row.differs:
                console.print(f"{row.name}: {difference_text(row)}", style="bold red" if row.wrong else "bold")
                for label, text in _call_lines(row):
                    console.print(f"    {label:7} {text}")
    console.print(summary(atlas))


def _call_lines(row: AtlasRow) -> Iterator[tuple[str, str]]:
    if row.torch == row.paddle:
        yield "both", _line(row.torch)
    else:
        yield "torch", _line(row.torch)
        yield "paddle", _line(row.paddle)
    for remark, call in mended_lines(row):
        yield "so", f"{remark} {_line(call)}".strip()
    if row.note:
        yield "why", row.note


def summary(atlas: Atlas) -> str:
    """Return the number of probes that differ, as a sentence."""
    differ = [row for row in atlas.rows if row.differs]
    none = sum(not row.mended and not row.mended_torch for row in differ)
    wrong = [row.name for row in atlas.rows if row.wrong]
    text = (
        f"torch {atlas.versions.reference} against paddle {atlas.versions.candidate}, called alike: {len(differ)} of "
        f"{len(atlas.rows)} probes differ. For {none} of them no call is known that agrees."
    )
    return f"{text} Calls that should agree and do not: {', '.join(wrong)}." if wrong else text


def markdown(atlas: Atlas) -> str:
    """Return the atlas as a Markdown page."""
    lines = [
        f"# Torch {atlas.versions.reference} and paddle {atlas.versions.candidate}, called alike",
        "",
        _METHOD,
        "",
        summary(atlas),
        "",
        _LEGEND,
    ]
    for name in dict.fromkeys(row.group for row in atlas.rows):
        rows = [row for row in atlas.rows if row.group == name]
        lines += ["", f"## {name.capitalize()}", ""]
        if any(row.differs for row in rows):
            lines += ["| what | torch | paddle | differs by | call it so |", "| --- | --- | --- | --- | --- |"]
            lines += [_page_row(row) for row in rows if row.differs]
        same = [row.name for row in rows if not row.differs]
        if same:
            lines += [""] * any(row.differs for row in rows) + [f"The same: {'; '.join(same)}."]
    return "\n".join(lines)


def _page_row(row: AtlasRow) -> str:
    # In Markdown two adjacent pairs of brackets are a link.
    differs = difference_text(row).replace("[", "\\[") if row.kind == "shapes" else difference_text(row)
    if row.agrees:
        differs += f"; float64 agrees with {row.agrees}"
    so = "<br>".join(f"{remark} {code(call)}".strip() for remark, call in mended_lines(row))
    note = f"<br>{cell(row.note)}" if row.note else ""
    return f"| {cell(row.name)}{note} | {code(row.torch)} | {code(row.paddle)} | {cell(differs)} | {so} |"


def code(call: str) -> str:
    """Return a call as code in a cell of a table."""
    return f"`{cell(_line(call))}`" if call else ""


def _line(call: str) -> str:
    return call.replace("\n", "; ")


def cell(text: str) -> str:
    """Return a text that stays in its cell of a table."""
    return text.replace("|", "\\|")
