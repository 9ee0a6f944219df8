// The tensor card: all that is known of one tensor in one step.

import { errorPicture, histogram, series } from "./charts.js";
import { copyButton, el, layerName, refill, sentence } from "./dom.js";
import { figure, standing, times } from "./format.js";
import { timesAllowed } from "./store.js";
import { name, stat } from "./verdict.js";

export class TensorCard {
  /** `on` has: close(), select({site, column}), link(). */
  constructor(store, on) {
    this.store = store;
    this.on = on;
    this.element = el("aside", { class: "drawer", id: "card", hidden: true, "aria-label": "Tensor" });
  }

  close() {
    this.element.hidden = true;
    this.shown = null;
  }

  async open(site, column) {
    const { store } = this;
    this.shown = { site, column };
    this.element.hidden = false;
    let diff = null;
    let trouble = null;
    try {
      diff = await store.diff(site, column);
    } catch (error) {
      trouble = String(error.message ?? error);
    }
    if (this.shown?.site !== site || this.shown?.column !== column) return;
    const first = store.firstDiff;
    const isFirst = store.firstCell()?.site === site && store.firstCell()?.column === column;
    const beyond = site.firstBeyond;
    refill(
      this.element,
      el(
        "header",
        {},
        el("span", { class: "where" }, el("b", {}, site.stage), " · step ", String(store.steps[column])),
        isFirst || diff?.standing ? el("span", { class: `chip${isFirst || diff.standing === "new" ? " differ" : ""}` }, standing(isFirst ? "first" : diff.standing)) : null,
        el("span", { class: "grow" }),
        el("button", { type: "button", class: "quiet", title: "step before", disabled: column === 0, click: () => this.#move(-1) }, "←"),
        el("button", { type: "button", class: "quiet", title: "next step", disabled: column >= store.steps.length - 1, click: () => this.#move(1) }, "→"),
        copyButton(() => this.on.link(), "Link"),
        el("button", { type: "button", class: "quiet close", title: "close (Esc)", click: () => this.on.close() }, "✕"),
      ),
      el(
        "div",
        { class: "scroll" },
        el(
          "div",
          { class: "sides" },
          el("div", {}, el("small", {}, "reference"), layerName(site.reference ? site.layer : null, store.typeOf("reference", site.layer)), el("code", { class: "slot" }, site.reference ? site.slot : "")),
          el("div", {}, el("small", {}, "candidate"), layerName(site.candidate ? (site.other ?? site.layer) : null, store.typeOf("candidate", site.other ?? site.layer)), el("code", { class: "slot" }, slotOf(site.candidate, site.stage))),
        ),
        this.#slots(site, column),
        trouble ? el("p", { class: "note" }, `The step can’t be read again: ${trouble}`) : null,
        diff ? figures(diff) : el("p", { class: "note" }, "This tensor was not recorded in this step."),
        el("h3", {}, "Times the allowed, over the steps"),
        series(site.times.subarray(0, store.steps.length), store.steps, column, (k) => this.on.select({ site, column: k })),
        el(
          "p",
          { class: "prose" },
          beyond === null ? "It is within its limit in every step." : `It is beyond its limit first in step ${store.steps[beyond]}.`,
        ),
        allowed(diff) ? el("div", { class: "why" }, el("h3", {}, "Why so much is allowed"), el("p", { class: "prose" }, sentence(allowed(diff)))) : null,
        this.#stacks(site),
        isFirst && first.picture ? this.#picture(first.picture) : null,
      ),
    );
  }

  #move(by) {
    const { site, column } = this.shown;
    this.on.select({ site, column: column + by });
  }

  /** The other tensors of this layer and stage. */
  #slots(site, column) {
    const some = site.node.sites.filter((one) => one.stage === site.stage);
    if (some.length < 2) return null;
    return el(
      "ul",
      { class: "slots" },
      some.map((one) => {
        const value = one.times[column];
        return el(
          "li",
          {},
          el(
            "button",
            { type: "button", class: one === site ? "on" : "", click: () => this.on.select({ site: one, column }) },
            el("code", {}, one.slot),
            el("span", { class: value > 1 ? "beyond" : "" }, value === undefined || Number.isNaN(value) ? "not compared" : times(value)),
          ),
        );
      }),
    );
  }

  /** Where either side's layer is called, as far as the runs recorded it. */
  #stacks(site) {
    const sides = [
      ["reference", site.reference ? site.layer : null],
      ["candidate", site.candidate ? (site.other ?? site.layer) : null],
    ];
    const shown = sides.map(([side, path]) => [side, stackOf(this.store.head.models?.stacks?.[side], path)]).filter(([, lines]) => lines.length);
    if (!shown.length) return null;
    return el(
      "div",
      { class: "stacks" },
      el("h3", {}, "Where it is called"),
      shown.map(([side, lines]) =>
        el(
          "div",
          {},
          el("small", {}, side),
          el(
            "ol",
            {},
            lines.map((line) => el("li", {}, el("span", {}, `${line.file}:${line.line} `, el("i", {}, line.function)), el("code", {}, line.code))),
          ),
        ),
      ),
    );
  }

  #picture(picture) {
    const style = getComputedStyle(document.documentElement);
    const [low, high] = ["errors-low", "errors-high"].map((name) => style.getPropertyValue(`--${name}`).trim());
    const ramp = (share) => `color-mix(in oklab, ${high} ${(100 * Math.sqrt(share)).toFixed(1)}%, ${low})`;
    return el(
      "div",
      { class: "pictures" },
      el("h3", {}, "Distributions"),
      histogram(picture),
      el("h3", {}, "Where in the tensor"),
      errorPicture(picture, ramp),
      picture.worst.length
        ? [
            el("h3", {}, "Worst elements"),
            el(
              "table",
              { class: "worst" },
              el("thead", {}, el("tr", {}, ["at", "reference", "candidate", "difference"].map((text) => el("th", {}, text)))),
              el(
                "tbody",
                {},
                picture.worst.map((one) =>
                  el(
                    "tr",
                    {},
                    el("td", {}, el("code", {}, `[${one.index.join(", ")}]`)),
                    el("td", {}, figure(one.reference, 5)),
                    el("td", {}, figure(one.candidate, 5)),
                    el("td", {}, figure(Number(one.candidate) - Number(one.reference), 3)),
                  ),
                ),
              ),
            ),
          ]
        : null,
    );
  }
}

function figures(diff) {
  const excess = timesAllowed(diff);
  const both = (pair) => (pair ? el("span", { class: "pairvalue" }, figure(pair.reference), el("i", {}, "↔"), figure(pair.candidate)) : null);
  const verdict = diff.passed ? (diff.max_abs === 0 && !diff.basis ? "bit-equal" : "within its limit") : "beyond its limit";
  return [
    el(
      "div",
      { class: `excess ${diff.passed ? "within" : "beyond"}` },
      el("b", {}, times(excess)),
      el("span", {}, "the allowed", el("small", {}, verdict)),
    ),
    diff.problem ? el("p", { class: "note" }, sentence(diff.problem)) : null,
    el(
      "dl",
      { class: "stats" },
      diff.judged ? stat(name(diff.judged.figure), figure(diff.judged.value), `allowed ${figure(diff.judged.limit)}`) : null,
      diff.max_abs !== undefined ? stat("largest |difference|", figure(diff.max_abs)) : null,
      diff.rel_l2 !== undefined && diff.judged?.figure !== "rel_l2" ? stat("relative L2", figure(diff.rel_l2)) : null,
      diff.mean_abs !== undefined ? stat("mean |difference|", figure(diff.mean_abs)) : null,
      diff.l2 ? stat("L2 norm of each", both(diff.l2)) : null,
      diff.worst ? stat("worst element", both(diff.worst), diff.worst.index.length ? `at [${diff.worst.index.join(", ")}]` : null) : null,
      diff.shape ? stat("shape", diff.shape.join(" × ") || "scalar") : null,
      diff.view ? stat("candidate’s layout", diff.view) : null,
      diff.basis ? stat("measured from", diff.basis, diff.spread ? `± ${(100 * diff.spread).toFixed(0)} %` : null) : null,
    ),
  ];
}

function allowed(diff) {
  return diff?.judged?.allowed_because ?? diff?.allowed_because;
}

/** The lines of a layer's call, outermost first; of a report that is older there are none. */
function stackOf(stacks, path) {
  const numbers = path === null ? null : stacks?.layers?.[path];
  return (numbers ?? []).map((number) => stacks.frames[number]).filter(Boolean);
}

function slotOf(site, stage) {
  if (!site) return "";
  const at = site.indexOf(`/${stage}/`);
  return at < 0 ? site : site.slice(at + stage.length + 2);
}
