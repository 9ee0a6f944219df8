"""A report as one HTML file that needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from padiff_page.bundle import script, style

# Significant digits of figures in the page; all digits would double the size of the file.
_DIGITS = 7

# Number of bytes per part, a multiple of 3 so that each part is base64 without padding.
_PART = 3 << 16

_BEFORE = """<!doctype html>
<html lang="{language}">
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
    """Return a report as a page in one file.

    Args:
        report: the JSON of ``padiff compare --json``, as a dict.

    Returns:
        The HTML. No text of the report can become markup: names are escaped, and the JSON is compressed and in base64,
        which contains no markup characters. The page's policy allows only the script and style that it contains, and no
        requests.
    """
    return "".join(page_parts(report, report["steps"]))


def page_parts(head: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the parts of a page in order, with at most one step in memory at a time.

    Args:
        head: the report; its steps, if it has any, are ignored. ``words`` are translations of the page's texts.
        steps: one item for each step, in the form of the report, or packed as in a log folder.
    """
    report = head
    code = f"{script('file.js')}void page.open(document.getElementById('padiff'));\n"
    look = style()
    policy = (
        f"default-src 'none'; script-src '{_digest(code)}'; style-src '{_digest(look)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"padiff: {report.get('reference', 'reference')} against {report.get('candidate', 'candidate')}"
    verdict = html.escape(str(report.get("verdict", "")))
    language = "zh" if report.get("words") else "en"
    yield _BEFORE.format(language=language, policy=policy, title=html.escape(title), style=look, verdict=verdict)
    yield from _compressed(_lines(report, steps))
    yield _AFTER.format(script=code)


def _lines(head: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the report without its steps, then each step, one per line, as in a log folder."""
    yield _json({key: value for key, value in head.items() if key != "steps"})
    for step in steps:
        yield "\n" + _json(step)


def _compressed(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, joined, as gzip in base64."""
    stream, pending = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16), b""
    for text in texts:
        pending += stream.compress(text.encode())
        ready = len(pending) // _PART * _PART
        if ready:
            yield base64.b64encode(pending[:ready]).decode()
            pending = pending[ready:]
    yield base64.b64encode(pending + stream.flush()).decode()


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
    """Return the hash by which a content security policy allows a script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
