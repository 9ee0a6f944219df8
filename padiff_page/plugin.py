"""The page as a tab of TensorBoard: it finds log folders below TensorBoard's, and follows ``diffs.jsonl`` by bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tensorboard.plugins.base_plugin import FrontendMetadata, TBContext, TBPlugin
from werkzeug import Request, Response

from padiff_page.bundle import static_files
from padiff_page.logs import outcome, pairs, part, report
from padiff_page.logs import version as version_of

#: A WSGI application, which TensorBoard calls for a request.
App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

_TYPES = {".js": "text/javascript", ".css": "text/css"}
# Seconds between two searches for log folders.
_LOOK = 2.0


class PadiffPlugin(TBPlugin):  # type: ignore[misc]
    """TensorBoard plugin with the tab ``padiff``."""

    plugin_name = "padiff"

    def __init__(self, context: TBContext) -> None:
        self._roots = _roots(context)
        self._looked = -_LOOK
        self._known: dict[str, Path] = {}

    def frontend_metadata(self) -> FrontendMetadata:
        return FrontendMetadata(es_module_path="/index.js", tab_name="padiff", disable_reload=True)

    def is_active(self) -> bool:
        return bool(self._pairs())

    def get_plugin_apps(self) -> dict[str, App]:
        apps: dict[str, App] = {
            f"/{name}": _static(content, _TYPES[Path(name).suffix]) for name, content in static_files().items()
        }
        routes = {
            "/pairs": self._serve_pairs,
            "/follow": self._serve_follow,
            "/lines": self._serve_lines,
            "/words": self._serve_words,
        }
        return apps | {route: _json(serve) for route, serve in routes.items()}

    def _pairs(self) -> dict[str, Path]:
        if time.monotonic() - self._looked >= _LOOK:
            self._known, self._looked = pairs(self._roots), time.monotonic()
        return self._known

    def _serve_pairs(self, _: Request) -> Any:
        entries = [{"name": name, "outcome": outcome(folder)} for name, folder in self._pairs().items()]
        # Comparisons that differ come first.
        return {"pairs": sorted(entries, key=lambda one: one["outcome"] != "differ")}

    def _serve_follow(self, request: Request) -> Any:
        folder = self._folder(request)
        response = part(folder, _number(request, "start"))
        version = version_of(folder)
        if version and version != request.args.get("version"):
            response |= {"report": report(folder), "version": version}
        return response

    def _serve_lines(self, request: Request) -> Any:
        content = part(self._folder(request), _number(request, "start"), _number(request, "end"))
        return {"lines": [text for _, _, text in content["lines"]]}

    def _serve_words(self, request: Request) -> Any:
        return {"words": (report(self._folder(request)) or {}).get("words", {})}

    def _folder(self, request: Request) -> Path:
        # The name is only looked up among known folders, and never used as a path.
        return self._pairs()[request.args["pair"]]


def _roots(context: TBContext) -> dict[str, Path]:
    """Return the folders that TensorBoard reads, by their names (``--logdir_spec``) if they have names."""
    if context.logdir:
        return {"": Path(context.logdir)}
    spec = getattr(context.flags, "logdir_spec", "") or ""
    named = (entry.partition(":") for entry in spec.split(",") if entry)
    return {name if path else "": Path(path or name) for name, _, path in named}


def _number(request: Request, name: str) -> int:
    return int(request.args.get(name, "0"))


def _static(content: bytes, kind: str) -> App:
    return _app(lambda _: _respond(content, kind))


def _json(answer: Callable[[Request], Any]) -> App:
    def respond(request: Request) -> Response:
        try:
            return _respond(json.dumps(answer(request)).encode(), "application/json")
        except (KeyError, ValueError, OSError) as error:
            text = "no such log folder" if isinstance(error, KeyError) else f"cannot be read: {error}"
            return _respond(json.dumps({"error": text}).encode(), "application/json", 404)

    return _app(respond)


def _app(respond: Callable[[Request], Response]) -> App:
    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body: Iterable[bytes] = respond(Request(environ))(environ, start_response)
        return body

    return serve


def _respond(content: bytes, kind: str, status: int = 200) -> Response:
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache, must-revalidate"}
    return Response(content, status=status, content_type=f"{kind}; charset=utf-8", headers=headers)
