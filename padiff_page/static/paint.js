// What the heat map is made of: cells one by one, labels of rows, numbers of steps.

import { BLANK, SKIPPED } from "./codes.js";
import { el } from "./dom.js";

/** Height of the line with the steps' numbers. */
export const AXIS = 26;

/** Cells that are large enough to be drawn one by one. */
export function paintCells(context, heat, range) {
  const { view, gutter } = heat;
  const gap = Math.min(view.column, view.row) >= 7 ? 1 : 0.5;
  context.save();
  context.beginPath();
  context.rect(gutter, AXIS, heat.plot.wide, heat.plot.tall);
  context.clip();
  for (let row = range.row; row < range.rowEnd; row++) {
    const cells = heat.store.cells(heat.rows[row], heat.stage);
    if (!cells) continue;
    const y = AXIS + row * view.row - view.y;
    for (let column = range.column; column < range.columnEnd; column++) {
      const code = cells.at(column);
      if (code === BLANK) continue;
      context.fillStyle = code === SKIPPED ? heat.hatch : heat.colours.css[code];
      context.fillRect(gutter + column * view.column - view.x, y, view.column - gap, view.row - gap);
    }
  }
  context.restore();
}

/** The names of rows, as far as there is room for them. */
export function paintLabels(context, heat, range) {
  const { view, gutter } = heat;
  context.save();
  context.beginPath();
  context.rect(0, AXIS, gutter - 8, heat.plot.tall);
  context.clip();
  context.textBaseline = "middle";
  let free = -Infinity; // rows may be lower than a line of text
  for (let row = range.row; row < range.rowEnd; row++) {
    const node = heat.rows[row];
    const y = AXIS + (row + 0.5) * view.row - view.y;
    const marked = node === heat.first?.node || (heat.first && !node.open && holds(node, heat.first.node));
    // Of rows that are lower than text, those are named that hold others; and the one with the first diff.
    if (!marked && (y - free < 13 || (view.row < 13 && !node.children.length))) continue;
    if (marked && y - free < 13) context.clearRect(0, free - 7, gutter - 8, 14);
    free = y;
    const x = 18 + Math.min(node.depth, 8) * 13;
    if (node.children.length) {
      context.fillStyle = heat.ink("muted");
      context.font = "9px system-ui, sans-serif";
      context.fillText(node.open ? "▼" : "▶", x - 13, y + 0.5);
    }
    context.font = `${marked ? "600 " : ""}12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace`;
    context.fillStyle = heat.ink(marked ? "differ" : node.side === "candidate" ? "warn" : "ink");
    const name = node.path === "(loop)" ? "loss and rate" : node.name;
    context.fillText(name, x, y);
    const end = x + context.measureText(name).width + 8;
    if (node.type && view.row >= 14) {
      context.fillStyle = heat.ink("faint");
      context.font = "11px system-ui, sans-serif";
      context.fillText(node.type, end, y);
    }
  }
  context.restore();
}

function holds(node, inner) {
  for (let one = inner; one; one = one.parent) if (one === node) return true;
  return false;
}

/** The numbers of steps, as many as have room. */
export function paintAxis(context, heat, range) {
  const { view, gutter } = heat;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillStyle = heat.ink("muted");
  context.fillText("step", gutter - 34, AXIS - 9);
  context.textAlign = "center";
  const widest = context.measureText(String(heat.store.steps.at(-1) ?? 0)).width + 12;
  const every = nice(widest / view.column);
  for (let column = Math.ceil(range.column / every) * every; column < range.columnEnd; column += every) {
    const x = gutter + (column + 0.5) * view.column - view.x;
    if (x >= gutter && x < heat.size.wide) context.fillText(String(heat.store.steps[column]), x, AXIS - 9);
  }
  context.textAlign = "left";
}

/** What stands for cells that were not compared. */
export function hatch(colour) {
  const small = el("canvas", { width: 6, height: 6 });
  const context = small.getContext("2d");
  context.strokeStyle = colour;
  context.lineWidth = 1;
  for (const start of [-6, 0, 6]) {
    context.moveTo(start, 6);
    context.lineTo(start + 6, 0);
  }
  context.stroke();
  return context.createPattern(small, "repeat");
}

/** A round number that is at least this. */
function nice(least) {
  let power = 1;
  while (true) {
    for (const one of [1, 2, 5]) if (one * power >= least) return one * power;
    power *= 10;
  }
}
