// Small drawings: a figure over the steps, two distributions, where in a tensor the error is.

import { el, svg } from "./dom.js";
import { figure, times } from "./format.js";

const LEAST = 1e-5;

/** How many times the allowed a tensor is, over the steps, with the limit as a line; `pick` gets a column. */
export function series(values, steps, column, pick) {
  const [wide, tall, left, bottom, top] = [400, 132, 40, 20, 8];
  const finite = [...values].filter((x) => Number.isFinite(x) && x > 0);
  const low = Math.floor(Math.log10(Math.max(Math.min(...finite, 0.1), LEAST)));
  const high = Math.ceil(Math.log10(Math.max(...finite, 10)));
  const x = (k) => left + (steps.length < 2 ? 0.5 : k / (steps.length - 1)) * (wide - left - 10);
  const y = (value) => {
    const power = value === Infinity ? high : Math.log10(Math.max(value, 10 ** low));
    return top + (1 - (power - low) / (high - low)) * (tall - top - bottom);
  };
  const drawing = svg("svg", { viewBox: `0 0 ${wide} ${tall}`, class: "chart", role: "img", "aria-label": "times the allowed over the steps" });
  const every = Math.max(1, Math.ceil((high - low) / 4));
  for (let power = low; power <= high; power += every) {
    const at = y(10 ** power);
    drawing.append(
      svg("line", { x1: left, x2: wide - 10, y1: at, y2: at, class: "rule" }),
      svg("text", { x: left - 6, y: at + 3.5, class: "tick", "text-anchor": "end" }, power === 0 ? "1" : figure(10 ** power, 1)),
    );
  }
  drawing.append(svg("line", { x1: left, x2: wide - 10, y1: y(1), y2: y(1), class: "limit" }));
  let path = "";
  let gap = true;
  // At most two points for each pixel: the least and the largest of the columns that share it.
  for (const k of thinned(values, 2 * wide)) {
    if (Number.isNaN(values[k]) || values[k] === undefined) {
      gap = true;
      continue;
    }
    path += `${gap ? "M" : "L"}${x(k).toFixed(1)} ${y(values[k]).toFixed(1)}`;
    gap = false;
  }
  drawing.append(svg("path", { d: path, class: "line" }));
  if (steps.length <= 60) {
    for (let k = 0; k < steps.length; k++) {
      if (!(values[k] >= 0)) continue;
      const dot = svg("circle", { cx: x(k), cy: y(values[k]), r: k === column ? 4.5 : 2.5, class: values[k] > 1 ? "dot beyond" : values[k] === 0 ? "dot equal" : "dot" });
      dot.append(svg("title", {}, `step ${steps[k]}: ${times(values[k])} allowed`));
      drawing.append(dot);
    }
  } else drawing.append(svg("circle", { cx: x(column), cy: y(values[column]), r: 4.5, class: "dot beyond" }));
  for (const k of new Set([0, column, steps.length - 1])) {
    const anchor = k === 0 ? "start" : k === steps.length - 1 ? "end" : "middle";
    const close = k !== column && Math.abs(x(k) - x(column)) < 44;
    if (!close) drawing.append(svg("text", { x: x(k), y: tall - 5, class: "tick", "text-anchor": anchor }, k === column ? `step ${steps[k]}` : steps[k]));
  }
  drawing.addEventListener("click", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * wide;
    pick(Math.min(Math.max(Math.round(((at - left) / (wide - left - 10)) * (steps.length - 1)), 0), steps.length - 1));
  });
  return drawing;
}

function thinned(values, most) {
  const count = values.length;
  if (count <= most) return Array.from({ length: count }, (_, k) => k);
  const found = [];
  const each = (2 * count) / most;
  for (let start = 0; start < count; start += each) {
    let [low, high] = [Math.floor(start), Math.floor(start)];
    for (let k = Math.floor(start); k < Math.min(start + each, count); k++) {
      if (values[k] < values[low]) low = k;
      if (values[k] > values[high]) high = k;
    }
    found.push(...(low < high ? [low, high] : [high, low]));
  }
  return found;
}

/** Both sides' distributions over one axis. */
export function histogram(picture) {
  const [wide, tall, bottom] = [400, 112, 18];
  const { edges, counts } = picture;
  const most = Math.max(...counts.reference, ...counts.candidate, 1);
  // Many values are near zero: a root lets the tails be seen.
  const y = (n) => (tall - bottom) * (1 - Math.sqrt(n / most)) + 2;
  const each = wide / counts.reference.length;
  const outline = (some) => {
    let path = `M0 ${tall - bottom}`;
    some.forEach((n, k) => (path += `L${(k * each).toFixed(1)} ${y(n).toFixed(1)}L${((k + 1) * each).toFixed(1)} ${y(n).toFixed(1)}`));
    return `${path}L${wide} ${tall - bottom}Z`;
  };
  return el(
    "div",
    {},
    svg(
      "svg",
      { viewBox: `0 0 ${wide} ${tall}`, class: "chart", role: "img", "aria-label": "distributions of both sides" },
      svg("path", { d: outline(counts.reference), class: "area reference" }),
      svg("path", { d: outline(counts.candidate), class: "area candidate" }),
      svg("text", { x: 0, y: tall - 4, class: "tick" }, figure(edges[0])),
      svg("text", { x: wide, y: tall - 4, class: "tick", "text-anchor": "end" }, figure(edges.at(-1))),
    ),
    el("p", { class: "keys" }, el("i", { class: "key reference" }), "reference", el("i", { class: "key candidate" }), "candidate", el("small", {}, "heights are roots of counts")),
  );
}

/** Where in the tensor the error is: a grid of the largest |difference| of each field. */
export function errorPicture(picture, ramp) {
  const grid = picture.error.map((row) => row.map((value) => (value === "inf" ? Infinity : (value ?? 0))));
  const most = Math.max(...grid.flat().filter(Number.isFinite), 0);
  const canvas = el("canvas", { class: "errors", width: grid[0].length, height: grid.length });
  canvas.style.aspectRatio = `${Math.max(grid[0].length, 6)} / ${Math.max(grid.length, 2)}`;
  const context = canvas.getContext("2d");
  grid.forEach((row, y) =>
    row.forEach((value, x) => {
      context.fillStyle = ramp(value === Infinity ? 1 : most ? value / most : 0);
      context.fillRect(x, y, 1, 1);
    }),
  );
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `largest |difference| ${figure(most)}`);
  const what = [picture.rows ? `↓ ${picture.rows}` : null, `→ ${picture.columns}`].filter(Boolean).join("   ");
  return el("div", {}, canvas, el("p", { class: "keys" }, what, el("small", {}, `strongest: ${figure(most)}`)));
}
