"""A real Chromium without a screen, driven through its DevTools over two pipes: the standard library is enough."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hard.children import started

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# As root there is no sandbox; the rest keeps it from looking for hosts and updates.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser of this machine, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Tab:
    """One page of a browser.

    Attributes:
        troubles: what the page complained about: errors of its console, exceptions, what its policy refused.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.troubles: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def close(self) -> None:
        self._browser.close_tab(self._session)

    def do(self, method: str, **values: Any) -> dict[str, Any]:
        return self._browser.do(method, self._session, **values)

    def open(self, address: str, wide: int = 1360, tall: int = 1000, dark: bool = False, scale: float = 1) -> None:
        self.size(wide, tall, scale)
        self.dark(dark)
        self.do("Page.navigate", url=address)

    def size(self, wide: int, tall: int, scale: float = 1) -> None:
        self.do("Emulation.setDeviceMetricsOverride", width=wide, height=tall, deviceScaleFactor=scale, mobile=False)

    def dark(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def run(self, code: str, context: int | None = None) -> Any:
        """What an expression gives, as JSON; a promise is waited for."""
        where = {} if context is None else {"contextId": context}
        answer = self.do("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True, **where)
        if "exceptionDetails" in answer:
            reported = answer["exceptionDetails"]
            raise AssertionError(reported.get("exception", {}).get("description") or reported["text"])
        return answer["result"].get("value")

    def wait(self, code: str, seconds: float = 20) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):  # what it looks at may not be there yet
                if self.run(f"Boolean({code})"):
                    return
            assert time.monotonic() < end, f"still not true after {seconds} s: {code}; {self.troubles}"
            time.sleep(0.03)

    def move(self, x: float, y: float) -> None:
        self.do("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.do(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def picture(self, path: Path, whole: bool = False) -> Path:
        """A screenshot, of what is seen or of the whole page."""
        answer = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def heard(self, method: str, values: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.troubles.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.troubles.append(" ".join(str(one.get("value", one)) for one in values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.troubles.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")


class Browser:
    """A browser that was started, and its answers."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._number, self._buffer = 0, b""
        self._tabs: dict[str, Tab] = {}
        self._contexts: dict[str, str] = {}

    def tab(self) -> Tab:
        """A new page of its own, with nothing kept of others."""
        context = self.do("Target.createBrowserContext")["browserContextId"]
        target = self.do("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        self._tabs[session] = tab
        self._contexts[session] = context
        return tab

    def close_tab(self, session: str) -> None:
        """Close a page and forget what belongs to it."""
        del self._tabs[session]
        self.do("Target.disposeBrowserContext", browserContextId=self._contexts.pop(session))

    def do(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if session:
            asked["sessionId"] = session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        while True:
            reported = self._next()
            if reported.get("id") == self._number:
                if "error" in reported:
                    raise AssertionError(f"{method}: {reported['error']['message']}")
                result: dict[str, Any] = reported["result"]
                return result
            tab = self._tabs.get(reported.get("sessionId", ""))
            if tab is not None and "method" in reported:
                tab.heard(reported["method"], reported["params"])

    def _next(self, seconds: float = 120) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], seconds)
            assert ready, f"the browser does not answer for {seconds} s"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        reported: dict[str, Any] = json.loads(text)
        return reported


@contextlib.contextmanager
def browser(program: str, folder: Path) -> Iterator[Browser]:
    """A browser with an empty profile, until the block ends."""
    asked_read, asked_write = os.pipe()
    told_read, told_write = os.pipe()
    command = ["bash", "-c", f'exec "$@" 3<&{asked_read} 4>&{told_write}', "browser", program, *OPTIONS]
    command.append(f"--user-data-dir={folder}")
    with contextlib.ExitStack() as ends:
        for end in (asked_write, told_read):
            ends.callback(os.close, end)
        with open(os.devnull, "w") as nowhere:
            process = started(command, pass_fds=(asked_read, told_write), stdout=nowhere, stderr=nowhere)
            try:
                ends.enter_context(process)
            finally:
                os.close(asked_read)
                os.close(told_write)
        yield Browser(asked_write, told_read)
