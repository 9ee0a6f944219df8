"""The heat map of layers by steps as a picture for TensorBoard, with a panel for each stage.

The colours and their meaning are the same as on the page (``padiff_page/static/codes.js``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from padiff.records import LOOP, STAGES
from padiff_hooks.step_lines import Rows
from padiff_hooks.tags import Numbered

# Codes of cells: a larger code is worse.
_BLANK, _SKIPPED, _EQUAL, _PASS, _FAIL, _ENDLESS = 0, 1, 2, (3, 127), (128, 254), 255
# Powers of ten that the scales reach below and above the limit.
_BELOW, _ABOVE = 4, 6
#: Columns of a panel; with more steps, neighbours are folded by their maximum.
COLUMNS = 64
#: Rows of a panel; with more layers, neighbours are folded by their maximum.
ROWS = 360

# Sizes in pixels. A card of TensorBoard has room for 355 by 210: letters are 11 tall there.
_WIDE, _TALL, _ROW = 640, 256, 32
_GAP, _TOP, _BOTTOM, _NAMES, _LINE, _FONT = 8, 56, 66, 200, 24, 20
_INK, _PAPER, _MARK = (60, 60, 64), (255, 255, 255), (20, 20, 20)
_SKIPPED_COLOUR, _EQUAL_COLOUR, _ENDLESS_COLOUR = (206, 205, 200), (156, 207, 176), (64, 4, 32)
_WITHIN = ((232, 240, 248), (173, 203, 232), (84, 139, 196))
_BEYOND = ((255, 190, 92), (240, 120, 44), (196, 52, 28), (112, 14, 40))


class HeatPicture:
    """A heat map that keeps the worst code of each layer and stage per column of steps, and draws the picture.

    Args:
        numbered: order of the layers.
    """

    def __init__(self, numbered: Numbered) -> None:
        self._numbered = numbered
        self._cells: dict[tuple[str, str], np.ndarray] = {}
        self._steps: list[int] = []
        self._fold = 1
        self.first: tuple[str, str, int] | None = None
        """Stage, layer and step of the first diff; `None` if no tensor shows it."""

    def add(self, step: int, rows: Rows, sites: Sequence[tuple[Any, ...]]) -> None:
        """Add a step as the last column; when the columns are used up, pairs of neighbours are folded into one."""
        if len(self._steps) == COLUMNS * self._fold:
            self._fold *= 2
            for place, cells in self._cells.items():
                pairs = cells.reshape(-1, 2).max(axis=1)
                self._cells[place] = np.concatenate([pairs, np.zeros(COLUMNS // 2, np.uint8)])
        column = len(self._steps) // self._fold
        self._steps.append(step)
        for number, code in zip(rows.sites.tolist(), _codes(rows).tolist()):
            stage, layer = place_of(sites[number])
            row = self._cells.get((stage, layer))
            if row is None:
                row = self._cells[stage, layer] = np.zeros(COLUMNS, np.uint8)
            row[column] = max(row[column], code)

    def draw(self) -> np.ndarray | None:
        """Return the picture as an array of shape (height, width, 3).

        Returns `None` if no cell was added, or if Pillow or its font is missing.
        """
        try:
            from PIL import Image, ImageDraw, ImageFont  # comes with TensorBoard

            font = ImageFont.load_default(_FONT)
        except (ImportError, OSError):  # no Pillow, or a Pillow without fonts
            return None
        stages = [stage for stage in STAGES if any(cell_stage == stage for cell_stage, _ in self._cells)]
        layer_names = {layer for _, layer in self._cells}
        layers = [layer for layer in self._numbered.layers if layer in layer_names]
        layers += [LOOP] * (LOOP in layer_names)
        if not stages or not layers:
            return None
        many = -(-len(layers) // ROWS)
        rows = -(-len(layers) // many)
        height = min(_ROW * rows, _TALL)
        columns = -(-len(self._steps) // self._fold)
        wide = (_WIDE - _NAMES) // len(stages) - _GAP
        image = Image.new("RGB", (_WIDE, _TOP + height + _BOTTOM), _PAPER)
        draw = ImageDraw.Draw(image)
        for k, stage in enumerate(stages):
            panel_x = _NAMES + k * (wide + _GAP)
            # A name may be wider than its panel: every second one is a line lower.
            name_x = min(panel_x, _WIDE - int(draw.textlength(stage, font)) - 4)
            draw.text((name_x, 4 + k % 2 * _LINE), stage, _INK, font)
            cells = np.stack([self._cells.get((stage, layer), np.zeros(COLUMNS, np.uint8)) for layer in layers])
            pixels = _PALETTE[_folded(cells[:, :columns], many)]
            panel = Image.fromarray(pixels).resize((wide, height), Image.Resampling.NEAREST)
            image.paste(panel, (panel_x, _TOP))
            draw.rectangle((panel_x - 1, _TOP - 1, panel_x + wide, _TOP + height), outline=(215, 215, 220))
            if self.first is not None and self.first[0] == stage and self.first[1] in layers:
                x = panel_x + self._column(self.first[2]) * wide // columns
                y = _TOP + layers.index(self.first[1]) // many * height // rows
                draw.rectangle((x - 2, y - 3, x + wide // columns + 1, y + height // rows + 2), outline=_MARK, width=2)
        middles = [_TOP + (k // many * 2 + 1) * height // rows // 2 for k in range(len(layers))]
        self._write_names(draw, font, layers, middles)
        last = f"steps {self._steps[0]} to {self._steps[-1]}" if len(self._steps) > 1 else f"step {self._steps[0]}"
        _write_legend(draw, font, last, _TOP + height + 10)
        return np.asarray(image)

    def _column(self, step: int) -> int:
        return self._steps.index(step) // self._fold if step in self._steps else 0

    def _write_names(self, draw: Any, font: Any, layers: Sequence[str], middles: Sequence[int]) -> None:
        """Draw the names of layers where there is room; the layer of the first diff is always named."""
        heights: list[int] = []
        first = self.first[1] if self.first is not None else None
        for layer, y in sorted(zip(layers, middles), key=lambda row: row[0] != first):
            if all(abs(y - height) >= _LINE for height in heights):
                heights.append(y)
                ink = (180, 40, 20) if layer == first else _INK
                draw.text((6, y), _short(self._numbered.tag(layer)), ink, font, anchor="lm")


@lru_cache(maxsize=1 << 16)  # all steps have the same sites
def place_of(site: tuple[Any, ...]) -> tuple[str, str]:
    """Return the stage and the layer of a site of ``diffs.jsonl``."""
    stage = site[0]
    return stage, str(site[1] or site[2]).partition(f"/{stage}/")[0]


def _short(name: str, letters: int = 18) -> str:
    return name if len(name) <= letters else f"{name[:8]}..{name[-(letters - 10) :]}"


def _codes(rows: Rows) -> np.ndarray:
    with np.errstate(all="ignore"):
        powers = np.log10(rows.times)
    inner = _scaled(_PASS, 1 + powers / _BELOW)
    outer = np.where(np.isinf(rows.times), _ENDLESS, _scaled(_FAIL, powers / _ABOVE))
    codes = np.where(rows.passed, np.where(rows.equal, _EQUAL, inner), outer)
    return np.where(rows.passed & np.isnan(rows.times), _SKIPPED, codes).astype(np.uint8)


def _scaled(scale: tuple[int, int], share: np.ndarray) -> np.ndarray:
    low, high = scale
    return np.asarray(low + np.rint(np.clip(np.nan_to_num(share, neginf=0.0), 0, 1) * (high - low)))


def _folded(cells: np.ndarray, many: int) -> np.ndarray:
    """Return the rows with each group of `many` neighbours replaced by their maximum."""
    missing = -len(cells) % many
    padded = np.pad(cells, ((0, missing), (0, 0)))
    return np.asarray(padded.reshape(-1, many, cells.shape[1]).max(axis=1))


def _palette() -> np.ndarray:
    table = np.full((256, 3), 255, np.uint8)
    table[_SKIPPED], table[_EQUAL], table[_ENDLESS] = _SKIPPED_COLOUR, _EQUAL_COLOUR, _ENDLESS_COLOUR
    for (low, high), stops in ((_PASS, _WITHIN), (_FAIL, _BEYOND)):
        places = np.linspace(0, len(stops) - 1, high - low + 1)
        for channel in range(3):
            table[low : high + 1, channel] = np.rint(
                np.interp(places, range(len(stops)), [stop[channel] for stop in stops])
            )
    return table


_PALETTE = _palette()


def _write_legend(draw: Any, font: Any, text: str, y: int) -> None:
    draw.text((_NAMES, y), text, _INK, font)
    x, y = 6, y + _LINE + 4
    for label, colours in _legend():
        for colour in colours:
            draw.rectangle((x, y + 4, x + 12, y + 18), fill=colour)
            x += 13
        draw.text((x + 6, y), label, _INK, font)
        x += int(draw.textlength(label, font)) + 22


def _legend() -> Iterable[tuple[str, Iterable[tuple[int, ...]]]]:
    within = tuple(map(tuple, _PALETTE[np.linspace(*_PASS, 4).astype(int)].tolist()))
    beyond = tuple(map(tuple, _PALETTE[np.linspace(*_FAIL, 4).astype(int)].tolist()))
    return (
        ("bit-equal", (_EQUAL_COLOUR,)),
        ("within limit", within),
        ("beyond", beyond),
        ("not compared", (_SKIPPED_COLOUR,)),
    )
