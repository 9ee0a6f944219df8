"""A report as one HTML file, which needs no server and no network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from padiff_page.bundle import script, style

# Digits of a figure that the page has any use for; all of them would double the size of the file.
_DIGITS = 7

_PAGE = """<!doctype html>
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
<script type="application/gzip" id="report">{report}</script>
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
    whole = f"{script('file.js')}void page.open(document.getElementById('padiff'));\n"
    look = style()
    compressed = gzip.compress("\n".join(_lines(report)).encode(), compresslevel=9, mtime=0)
    policy = (
        f"default-src 'none'; script-src '{_digest(whole)}'; style-src '{_digest(look)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"padiff: {report.get('reference', 'reference')} against {report.get('candidate', 'candidate')}"
    return _PAGE.format(
        policy=policy,
        title=html.escape(title),
        style=look,
        verdict=html.escape(str(report.get("verdict", ""))),
        report=base64.b64encode(compressed).decode(),
        script=whole,
    )


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report without its steps, then each step: as a log folder has them."""
    yield _json({key: value for key, value in report.items() if key != "steps"})
    for step in report["steps"]:
        yield _json(step)


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
