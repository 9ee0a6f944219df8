// The heat map: layers by steps on a canvas. Rows and columns that are smaller than a pixel are folded by their maximum,
// so that nothing that differs is lost, and a frame costs about as much as it has pixels.

import { palette } from "./codes.js";
import { el } from "./dom.js";
import { FoldedPicture } from "./folded.js";
import { AXIS, hatch, paintAxis, paintCells, paintLabels } from "./paint.js";
import { scheme } from "./scheme.js";

const ROW = 22;
// A column of few steps is at most so wide.
const COLUMN = 64;
// Cells from this size on are drawn one by one, with a gap between them.
const SINGLE = 4;

export class HeatMap {
  /** `on` has: select(node, column or null), fold(node), hover(node, column or null), text(node, column). */
  constructor(store, on) {
    this.store = store;
    this.on = on;
    this.stage = "all";
    this.rows = [];
    this.view = { x: 0, y: 0, column: COLUMN, row: ROW };
    this.fits = true;
    this.frames = [];
    this.base = el("canvas", { class: "base" });
    this.over = el("canvas", { class: "over" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.element = el("div", { class: "heat", tabindex: 0, role: "application" }, this.base, this.over, this.tip);
    this.element.setAttribute("aria-label", "Layers by steps; arrows move, Enter opens");
    this.#listen();
    this.resized = new ResizeObserver(() => this.layout());
    this.resized.observe(this.element);
    this.scheme = scheme;
    this.scheme.addEventListener("change", () => this.theme());
    this.theme();
  }

  theme() {
    const style = getComputedStyle(document.documentElement);
    // Looked up once: asking the style in every frame would make the browser work it out in every frame.
    const names = ["ink", "muted", "faint", "differ", "warn", "lit", "hatch"];
    const known = new Map(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim() || "gray"]));
    this.ink = (name) => known.get(name);
    this.colours = palette(this.scheme.matches);
    this.hatch = hatch(this.ink("hatch"));
    this.draw();
  }

  /** Rows, columns or the stage are others. */
  update() {
    this.rows = this.store.tree.visible();
    this.version = (this.version ?? 0) + 1;
    this.placeOf = new Map(this.rows.map((node, k) => [node, k]));
    this.layout();
  }

  layout() {
    const wide = this.element.clientWidth;
    if (!wide) return;
    this.gutter = Math.round(Math.min(Math.max(wide * 0.26, 130), 300));
    const most = this.tall ?? Math.max(Math.round(window.innerHeight * 0.62), 240);
    const tall = Math.min(AXIS + this.rows.length * Math.max(this.view.row, 1) + 4, most);
    this.size = { wide, tall: Math.max(Math.round(tall), 3 * ROW + AXIS) };
    const scale = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.over]) {
      canvas.width = Math.round(wide * scale);
      canvas.height = Math.round(this.size.tall * scale);
      canvas.style.width = `${wide}px`;
      canvas.style.height = `${this.size.tall}px`;
    }
    this.element.style.height = `${this.size.tall}px`;
    this.scale = scale;
    if (this.fits) this.view.column = this.#fitting();
    this.#clamp();
    this.draw();
  }

  get plot() {
    return { wide: this.size.wide - this.gutter, tall: this.size.tall - AXIS };
  }

  #fitting() {
    return Math.min(COLUMN, this.plot.wide / Math.max(this.store.steps.length, 1));
  }

  #clamp() {
    const { view, plot } = this;
    view.x = Math.min(Math.max(view.x, 0), Math.max(this.store.steps.length * view.column - plot.wide, 0));
    view.y = Math.min(Math.max(view.y, 0), Math.max(this.rows.length * view.row - plot.tall, 0));
  }

  /** All rows and columns at once. */
  fit() {
    this.fits = true;
    this.view.row = Math.min(ROW, Math.max((this.tall ?? window.innerHeight * 0.62) - AXIS, 100) / Math.max(this.rows.length, 1));
    this.layout();
  }

  zoom(factor, x = this.gutter + this.plot.wide / 2, y = AXIS + this.plot.tall / 2, rows = true) {
    const { view } = this;
    const column = (view.x + x - this.gutter) / view.column;
    const row = (view.y + y - AXIS) / view.row;
    view.column = Math.min(Math.max(view.column * factor, Math.min(this.#fitting(), COLUMN)), COLUMN);
    if (rows) view.row = Math.min(Math.max(view.row * factor, Math.min(ROW, this.plot.tall / this.rows.length)), ROW);
    this.fits = view.column <= this.#fitting();
    view.x = column * view.column - (x - this.gutter);
    view.y = row * view.row - (y - AXIS);
    this.layout();
  }

  /** Bring a cell into view. */
  show(node, column) {
    const row = this.placeOf?.get(node);
    if (row === undefined || !this.size) return;
    const { view, plot } = this;
    const top = row * view.row;
    if (top < view.y || top + view.row > view.y + plot.tall) view.y = top - plot.tall / 2;
    if (column !== null && column !== undefined) {
      const left = column * view.column;
      if (left < view.x || left + view.column > view.x + plot.wide) view.x = left - plot.wide / 2;
    }
    this.#clamp();
    this.draw();
  }

  draw() {
    if (this.pending || !this.size) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.paint();
    });
  }

  paint() {
    const began = performance.now();
    const context = this.base.getContext("2d");
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, this.size.wide, this.size.tall);
    const { view, plot } = this;
    const range = {
      row: Math.floor(view.y / view.row),
      rowEnd: Math.min(Math.ceil((view.y + plot.tall) / view.row), this.rows.length),
      column: Math.floor(view.x / view.column),
      columnEnd: Math.min(Math.ceil((view.x + plot.wide) / view.column), this.store.steps.length),
    };
    if (view.column >= SINGLE && view.row >= SINGLE) paintCells(context, this, range);
    else this.#folded(context, range);
    paintLabels(context, this, range);
    paintAxis(context, this, range);
    this.#overlay();
    this.frames.push(performance.now() - began);
    if (this.frames.length > 500) this.frames.shift();
  }

  #folded(context, range) {
    const { view, plot, store, stage } = this;
    const wide = Math.ceil(Math.min(plot.wide, range.columnEnd * view.column - view.x));
    const tall = Math.ceil(Math.min(plot.tall, range.rowEnd * view.row - view.y));
    if (wide <= 0 || tall <= 0) return;
    const key = [view.x, view.y, view.column, view.row, wide, tall, stage, store.steps.length, this.version, this.scheme.matches].join();
    if (this.foldedKey !== key) {
      const rows = this.rows.map((node) => store.cells(node, stage));
      this.foldedKey = key;
      this.foldedPicture = new FoldedPicture(rows, { ...view }, wide, tall, range.columnEnd, this.colours.pixels);
      this.whole = false;
    }
    if (!this.whole) this.whole = this.foldedPicture.work();
    context.imageSmoothingEnabled = false;
    context.drawImage(this.foldedPicture.canvas, this.gutter, AXIS);
    if (!this.whole) this.draw();
  }

  /** What lies over the cells: the row and cell under the pointer, the one that is open, the first that is beyond. */
  #overlay() {
    const context = this.over.getContext("2d");
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, this.size.wide, this.size.tall);
    if (this.lit) this.#band(context, this.lit);
    for (const one of this.store.further) {
      if (this.stage === "all" || this.stage === one.stage) this.#ring(context, one, this.ink("differ"), 1.5);
    }
    if (this.first) this.#ring(context, this.first, this.ink("differ"), 2);
    if (this.selected) this.#ring(context, this.selected, this.ink("ink"), 2);
    if (this.hovered?.column !== null && this.hovered) this.#ring(context, this.hovered, this.ink("muted"), 1);
  }

  #band(context, node) {
    const row = this.placeOf.get(node);
    if (row === undefined) return;
    const y = AXIS + row * this.view.row - this.view.y;
    if (y + this.view.row < AXIS) return;
    context.fillStyle = this.ink("lit");
    context.fillRect(0, Math.max(y, AXIS), this.size.wide, Math.max(this.view.row - 1, 2));
  }

  #ring(context, { node, column }, colour, wide) {
    let shown = node;
    while (shown && !this.placeOf.has(shown)) shown = shown.parent; // a folded layer stands for it
    if (!shown || column === null || column === undefined) return;
    const { view } = this;
    const x = this.gutter + column * view.column - view.x;
    const y = AXIS + this.placeOf.get(shown) * view.row - view.y;
    if (x < this.gutter - 1 || x > this.size.wide || y < AXIS - 1 || y > this.size.tall) return;
    const small = Math.max(8 - Math.min(view.column, view.row), 0) / 2;
    context.strokeStyle = colour;
    context.lineWidth = wide;
    context.beginPath();
    context.roundRect(x - 1 - small, y - 1 - small, view.column + 1 + 2 * small, view.row + 1 + 2 * small, 3);
    context.stroke();
  }

  /** Where in the page a cell is: its middle, from the element's corner. */
  spot(node, column) {
    const row = this.placeOf.get(node);
    const { view } = this;
    return { x: this.gutter + (column + 0.5) * view.column - view.x, y: AXIS + (row + 0.5) * view.row - view.y };
  }

  at(x, y) {
    const { view } = this;
    if (y < AXIS || !this.size) return null;
    const row = Math.floor((view.y + y - AXIS) / view.row);
    const node = this.rows[row];
    if (!node) return null;
    if (x < this.gutter) return { node, column: null };
    const column = Math.floor((view.x + x - this.gutter) / view.column);
    if (column >= this.store.steps.length) return null;
    const end = Math.min(Math.max(Math.ceil((view.x + x - this.gutter + 1) / view.column), column + 1), this.store.steps.length);
    return { node, column, end };
  }

  hover(found, x, y) {
    const same = found?.node === this.hovered?.node && found?.column === this.hovered?.column;
    this.hovered = found;
    if (!same) {
      this.lit = found?.node ?? null;
      this.on.hover(found?.node ?? null);
      if (this.size) this.#overlay();
    }
    const text = found && found.column !== null ? this.on.text(found) : null;
    this.tip.hidden = !text;
    if (!text) return;
    this.tip.replaceChildren(...text);
    const left = Math.min(x + 14, this.size.wide - this.tip.offsetWidth - 4);
    const above = y + 18 + this.tip.offsetHeight > this.size.tall + 60;
    this.tip.style.left = `${Math.max(left, 0)}px`;
    this.tip.style.top = `${above ? y - this.tip.offsetHeight - 8 : y + 18}px`;
  }

  light(node) {
    this.lit = node;
    if (this.size) this.#overlay();
  }

  #listen() {
    const place = (event) => {
      const box = this.element.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    let from = null;
    this.element.addEventListener("pointerdown", (event) => {
      if (event.button === 0) from = { at: place(event), x: this.view.x, y: this.view.y, moved: false };
    });
    this.element.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (from && (event.buttons & 1) && Math.hypot(x - from.at[0], y - from.at[1]) > 4) {
        if (!from.moved) this.element.setPointerCapture(event.pointerId);
        from.moved = true;
        this.view.x = from.x + from.at[0] - x;
        this.view.y = from.y + from.at[1] - y;
        this.#clamp();
        this.draw();
        return;
      }
      const found = this.at(x, y);
      this.element.style.cursor = found ? "pointer" : "default";
      this.hover(found, x, y);
    });
    this.element.addEventListener("pointerleave", () => this.hover(null));
    this.element.addEventListener("click", (event) => {
      const moved = from?.moved;
      from = null;
      if (moved) return;
      const found = this.at(...place(event));
      if (!found) return;
      if (found.column === null && found.node.children.length) this.on.fold(found.node);
      else this.on.select(found);
    });
    this.element.addEventListener(
      "wheel",
      (event) => {
        const before = [this.view.x, this.view.y, this.view.column];
        if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY / 240), ...place(event));
        else {
          this.view.x += event.shiftKey ? event.deltaY : event.deltaX;
          this.view.y += event.shiftKey ? 0 : event.deltaY;
          this.#clamp();
        }
        const moved = before.some((was, k) => was !== [this.view.x, this.view.y, this.view.column][k]);
        // At its end the page scrolls on.
        if (!moved && !event.ctrlKey) return;
        event.preventDefault();
        this.draw();
      },
      { passive: false },
    );
  }
}
