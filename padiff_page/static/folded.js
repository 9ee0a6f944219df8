// Cells that are smaller than a pixel, folded by their maximum into a picture. The picture is made in slices of a few
// milliseconds, coarse first: however many cells there are, the page answers in between.

import { fold, levelFor, spans } from "./cells.js";
import { el } from "./dom.js";

// Milliseconds of a frame that are spent on it, and lines that the coarse picture has in one.
const BUDGET = 24;
const COARSE = 8;

export class FoldedPicture {
  /** `rows` are the cells of each row, or undefined; `view` has x, y, column and row in pixels. */
  constructor(rows, view, wide, tall, end, pixels) {
    Object.assign(this, { rows, view, wide, tall, colours: pixels });
    const columns = 1 / view.column;
    this.level = levelFor(columns);
    this.spread = spans(wide, view.x / view.column, columns, end, this.level);
    this.pixels = new Uint32Array(wide * tall);
    this.line = new Uint8Array(wide);
    this.next = 0;
    this.coarse = rows.length > COARSE * tall || wide * rows.length > 100_000;
    this.canvas = el("canvas", { width: wide, height: tall });
  }

  /** Go on with it; true when it is whole. */
  work() {
    const began = performance.now();
    while (this.coarse || this.next < this.tall) {
      if (this.next >= this.tall) {
        this.coarse = false;
        this.next = 0;
        continue;
      }
      const lines = this.coarse ? Math.min(COARSE, this.tall - this.next) : 1;
      this.#draw(this.next, lines);
      this.next += lines;
      if (performance.now() - began > BUDGET) break;
    }
    const picture = new ImageData(new Uint8ClampedArray(this.pixels.buffer), this.wide, this.tall);
    this.canvas.getContext("2d").putImageData(picture, 0, 0);
    return !this.coarse && this.next >= this.tall;
  }

  /** A line of pixels, and the same on the lines after it. */
  #draw(y, lines) {
    const { view, wide, pixels, line } = this;
    const top = Math.floor((view.y + y) / view.row);
    const end = Math.min(Math.max(Math.ceil((view.y + y + 1) / view.row), top + 1), this.rows.length);
    const start = y * wide;
    if (y && !this.coarse && top === this.last?.[0] && end === this.last[1]) pixels.copyWithin(start, start - wide, start);
    else {
      line.fill(0);
      for (let row = top; row < end; row++) {
        const cells = this.rows[row];
        if (cells) fold(line, cells.levels[this.level], this.spread);
      }
      for (let x = 0; x < wide; x++) pixels[start + x] = this.colours[line[x]];
    }
    this.last = [top, end];
    for (let k = 1; k < lines; k++) pixels.copyWithin(start + k * wide, start, start + wide);
  }
}
