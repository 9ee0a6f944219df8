"""A report as one HTML file, which needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from padiff_page.bundle import script, style

# Digits of a figure that the page has any use for; all of them would double the size of the file.
_DIGITS = 7

# Bytes that stand for whole letters of base64.
_PART = 3 << 16

_BEFORE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="padiff"></div>
<noscript>padiff: {verdict}</noscript>
<script type="application/gzip" id="report">"""
_AFTER = """</script>
<script>{script}</script>
</body>
</html>
"""


def page(report: Mapping[str, Any]) -> str:
    """A report as a page in one file.

    Args:
        report: what ``padiff compare --json`` writes, read again.

    Returns:
        The HTML. Nothing of the report is markup in it: names are escaped, and the JSON is compressed and in base64,
        whose letters end no element. The page may run the script and the style that it was written with, and fetch
        nothing.
    """
    return "".join(page_parts(report, report["steps"]))


def page_parts(head: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The parts of a page, one after the other: no more than a step is held at a time.

    Args:
        head: the report; its steps, if it has any, are not looked at.
        steps: the lines of its steps: as the report has them, or packed as a log folder has them.
    """
    report = head
    whole = f"{script('file.js')}void page.open(document.getElementById('padiff'));\n"
    look = style()
    policy = (
        f"default-src 'none'; script-src '{_digest(whole)}'; style-src '{_digest(look)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"padiff: {report.get('reference', 'reference')} against {report.get('candidate', 'candidate')}"
    verdict = html.escape(str(report.get("verdict", "")))
    yield _BEFORE.format(policy=policy, title=html.escape(title), style=look, verdict=verdict)
    yield from _compressed(_lines(report, steps))
    yield _AFTER.format(script=whole)


def _lines(head: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The report without its steps, then each step: as a log folder has them."""
    yield _json({key: value for key, value in head.items() if key != "steps"})
    for step in steps:
        yield "\n" + _json(step)


def _compressed(texts: Iterable[str]) -> Iterator[str]:
    """Texts as one, compressed (gzip) and in base64."""
    stream, rest = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16), b""
    for text in texts:
        rest += stream.compress(text.encode())
        whole = len(rest) // _PART * _PART
        if whole:
            yield base64.b64encode(rest[:whole]).decode()
            rest = rest[whole:]
    yield base64.b64encode(rest + stream.flush()).decode()


def _json(content: Any) -> str:
    return json.dumps(_rounded(content), separators=(",", ":"))


def _rounded(content: Any) -> Any:
    if isinstance(content, float):
        return float(f"{content:.{_DIGITS}g}")
    if isinstance(content, Mapping):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_rounded(value) for value in content]
    return content


def _digest(text: str) -> str:
    """What a content security policy calls a script or style that it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
