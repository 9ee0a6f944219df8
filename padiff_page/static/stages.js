// The stages in causal order, as tiles: how much of each differs, and which one the heat map shows.

import { palette, codeOf } from "./codes.js";
import { el } from "./dom.js";
import { tenTo, times } from "./format.js";
import { ALL, STAGES } from "./store.js";

export function stageTiles(store, chosen, choose, dark) {
  const colours = palette(dark).css;
  const tiles = [];
  const total = { compared: 0, differ: 0, worst: -1 };
  for (const stage of STAGES) {
    const known = store.stages.get(stage);
    if (!known) continue;
    total.compared += known.compared;
    total.differ += known.differ;
    total.worst = Math.max(total.worst, known.worst);
    tiles.push(tile(stage, known));
  }
  tiles.push(tile(ALL, total));
  const list = el("div", { class: "stages", role: "tablist", "aria-label": "Stage" }, tiles);
  list.style.setProperty("--tiles", tiles.length);
  return list;

  function tile(stage, known) {
    const mark = el("i", { class: "mark" });
    const code = known.worst < 0 ? 1 : codeOf(known.worst, !known.differ, true, known.worst === 0);
    mark.style.background = colours[code];
    return el(
      "button",
      {
        type: "button",
        role: "tab",
        "data-stage": stage,
        "aria-selected": String(stage === chosen),
        class: known.differ ? "differs" : "",
        title: known.differ ? `${known.differ} differ; worst: ${times(known.worst)} allowed` : known.worst >= 0 ? `worst: ${times(known.worst)} allowed` : "nothing was compared",
        click: () => choose(stage),
      },
      el("span", { class: "name" }, mark, stage),
      el("span", { class: "count" }, known.differ ? [el("b", {}, known.differ.toLocaleString("en")), ` of ${known.compared.toLocaleString("en")}`] : `${known.compared.toLocaleString("en")} agree`),
    );
  }
}

/** What the colours mean. */
export function legend(store, dark) {
  const { css } = palette(dark);
  const bar = el("span", { class: "scale" });
  const stops = [];
  for (let k = 0; k <= 20; k++) {
    const power = -4 + k / 2;
    stops.push(css[codeOf(10 ** power, power <= 0, true, false)]);
  }
  stops.forEach((colour) => {
    const one = el("i", {});
    one.style.background = colour;
    bar.append(one);
  });
  const key = (kind, text) => {
    const box = el("i", { class: `box ${kind}` });
    if (kind === "equal") box.style.background = css[2];
    return el("span", { class: "key" }, box, text);
  };
  return el(
    "div",
    { class: "legend" },
    el(
      "span",
      { class: "ramp" },
      bar,
      el("span", { class: "ticks" }, [-4, -2, 0, 2, 4, 6].map((power) => el("span", {}, power === 0 ? "limit" : tenTo(power)))),
    ),
    key("equal", "bit-equal"),
    key("skipped", "not compared"),
    key("ring", store.further.length ? "first diff, and faults that do not follow" : "first diff"),
  );
}
