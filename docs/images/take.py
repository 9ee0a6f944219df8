"""Takes the pictures of this folder from the demo's runs: ``python docs/images/take.py DEMO_DIR``.

DEMO_DIR is what ``padiff demo DEMO_DIR`` made. It needs a Chromium and, for colours of a palette, Pillow.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from kit.browser import Tab, browser, find  # noqa: E402
from page.tensorboards import tensorboard  # noqa: E402

WIDE, TALL = 1360, 1000
#: Seconds in which the page comes to rest.
REST = 0.6
#: And in which TensorBoard has drawn its cards.
DRAWN = 5


def keep(tab: Tab, name: str) -> None:
    """Keep what is seen, as a PNG of 256 colours: a quarter of its size, and nobody sees the difference."""
    time.sleep(REST)
    path = tab.picture(HERE / name)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def take(demo: Path) -> None:
    program = find()
    if program is None:
        raise SystemExit("there is no Chromium on this machine")
    with tempfile.TemporaryDirectory() as profile, browser(program, Path(profile)) as started:
        address = (demo.resolve() / "report.html").as_uri()
        ready = "window.padiff && padiff.heat.frames.length && document.querySelector('#verdict .stats')"
        tab = started.tab()
        tab.open(address, WIDE, 1120)
        tab.wait(ready)
        keep(tab, "page.png")
        tab.open("about:blank", WIDE, TALL)
        tab.open(address, 1500, TALL, dark=True)
        tab.wait(ready)
        tab.run("padiff.select(padiff.store.firstCell())")
        tab.run("window.scrollTo(0, 480)")
        keep(tab, "page-card-dark.png")
        with tempfile.TemporaryDirectory() as installed, tensorboard(demo / "tensorboard", Path(installed)) as board:
            tab = started.tab()
            tab.open(f"{board}#padiff", WIDE, TALL)
            tab.wait("document.querySelector('iframe').contentWindow.padiff.heat.frames.length", 60)
            keep(tab, "page-tensorboard.png")
        with (
            tempfile.TemporaryDirectory() as installed,
            tensorboard(demo / "tensorboard/fault", Path(installed)) as board,
        ):
            tab = started.tab()
            tab.open(board, WIDE, TALL)
            tab.wait("['/heat_map', '/learning_rate', '/loss'].every(one => document.body.innerText.includes(one))", 60)
            time.sleep(DRAWN)
            keep(tab, "tensorboard-cold.png")


if __name__ == "__main__":
    take(Path(sys.argv[1]))
