// The two models side by side, with the map that was found: what lies under the pointer lights its partner.

import { BEYOND, palette } from "./codes.js";
import { el, refill } from "./dom.js";
import { scheme } from "./scheme.js";
import { ROOT, Tree } from "./tree.js";

const ROW = 24;

export class Trees {
  /** `on` has: hover(reference path or null), select(reference path). */
  constructor(store, on) {
    this.store = store;
    this.on = on;
    this.sides = ["reference", "candidate"].map((which) => new Side(which, this));
    this.element = el("div", { class: "trees" }, this.sides.map((side) => side.element));
  }

  /** The models are known, or others. */
  update() {
    const models = this.store.head.models;
    if (!models || models === this.models) return;
    this.models = models;
    this.partners = { reference: new Map(), candidate: new Map() };
    for (const one of models.partners) {
      push(this.partners.reference, one.reference, { path: one.candidate, ...one });
      push(this.partners.candidate, one.candidate, { path: one.reference, ...one });
    }
    this.sides.forEach((side) => side.build(models[side.which], this.store));
  }

  /** Light a layer and its partners, wherever they are. */
  light(which, path) {
    const others = path === null ? [] : (this.partners?.[which].get(path) ?? []).map((one) => one.path);
    for (const side of this.sides) side.light(path === null ? [] : side.which === which ? [path] : others, side.which !== which);
  }

  /** The reference's layer that a row of either side stands for; its own where there is none. */
  rowOf(which, path) {
    return which === "reference" ? path : (this.partners.candidate.get(path)?.[0]?.path ?? path);
  }

  refresh() {
    this.sides.forEach((side) => side.paint());
  }
}

class Side {
  constructor(which, trees) {
    this.which = which;
    this.trees = trees;
    this.lit = new Set();
    this.inner = el("div", { class: "inner" });
    this.list = el("div", { class: "list", tabindex: 0 }, this.inner);
    this.title = el("h3", {});
    this.element = el("div", { class: `model ${which}` }, this.title, this.list);
    this.list.addEventListener("scroll", () => this.paint());
    this.list.addEventListener("pointerleave", () => this.#hover(null));
  }

  build(model, store) {
    const head = store.head;
    refill(this.title, el("span", {}, this.which), el("b", {}, head[this.which] ?? ""), el("small", {}, model.framework));
    this.tree = new Tree();
    for (const [path, type] of model.layers) this.tree.node(path).type = type;
    const first = store.firstDiff?.[this.which];
    this.first = first ? this.tree.byKey.get(first) : null;
    if (model.layers.length <= 60) this.tree.openAll(true);
    else this.tree.openTo(40);
    this.first?.reveal();
    this.update();
    if (this.first) this.#into(this.first);
  }

  update() {
    this.rows = this.tree.visible();
    this.inner.style.height = `${this.rows.length * ROW}px`;
    this.paint();
  }

  light(paths, follow) {
    const nodes = paths.map((path) => this.tree?.byKey.get(path)).filter(Boolean);
    this.lit = new Set(nodes);
    if (follow && nodes.length) {
      // A folded layer stands for what is inside of it.
      let node = nodes[0];
      while (node && !this.rows.includes(node)) node = node.parent;
      if (node) {
        this.lit.add(node);
        this.#into(node);
      }
    }
    this.paint();
  }

  #into(node) {
    const at = this.rows.indexOf(node) * ROW;
    const { scrollTop, clientHeight } = this.list;
    if (at < scrollTop || at + ROW > scrollTop + clientHeight) this.list.scrollTop = at - clientHeight / 2;
  }

  paint() {
    if (!this.tree) return;
    const start = Math.max(Math.floor(this.list.scrollTop / ROW) - 4, 0);
    const end = Math.min(start + Math.ceil((this.list.clientHeight || 420) / ROW) + 8, this.rows.length);
    const { store, partners } = this.trees;
    const colours = palette(scheme.matches).css;
    const rows = [];
    for (let k = start; k < end; k++) rows.push(this.#row(this.rows[k], k, store, partners[this.which], colours));
    refill(this.inner, rows);
  }

  #row(node, k, store, partners, colours) {
    const some = partners.get(node.path);
    const inside = node.children.length > 0;
    const row = el(
      "div",
      {
        class: ["row", this.lit.has(node) ? "lit" : "", node === this.first ? "first" : "", this.#alone(node, some) ? "alone" : ""].join(" "),
        "data-path": node.path,
        pointerenter: () => this.#hover(node.path),
        click: () => this.trees.on.select(this.trees.rowOf(this.which, node.path)),
      },
      el("span", { class: "state", title: store.firstCell() ? `in step ${store.firstDiff.step}` : "worst of all steps" }),
      el(
        "button",
        {
          type: "button",
          class: inside ? "fold" : "fold leaf",
          tabindex: -1,
          "aria-label": node.open ? "fold" : "unfold",
          click: (event) => {
            event.stopPropagation();
            node.open = !node.open;
            this.update();
          },
        },
        node.open ? "▼" : "▶",
      ),
      el("code", {}, node.name),
      el("span", { class: "type" }, node.type),
      node === this.first ? el("span", { class: "chip differ" }, "first diff") : null,
      el("span", { class: "grow" }),
      this.#found(node, some),
    );
    row.style.top = `${k * ROW}px`;
    row.style.paddingLeft = `${6 + Math.min(node.depth, 9) * 14}px`;
    const worst = this.#code(node, store);
    if (worst) row.firstChild.style.background = colours[worst];
    if (worst >= BEYOND) row.classList.add("beyond");
    return row;
  }

  /** What a layer hands on in the step of the first diff, or its worst where there is none; a candidate's layer has the
   * row of its partner. */
  #code(node, store) {
    const path = this.trees.rowOf(this.which, node.path);
    const row = store.tree.byKey.get(path) ?? store.tree.byKey.get(`\n${node.path}`);
    const cells = row && (node.open && node.children.length ? row.own : row.folded).at(-1);
    const column = store.firstCell()?.column;
    if (!cells) return 0;
    return column === undefined ? cells.most(0, store.steps.length) : cells.at(column);
  }

  #found(node, some) {
    if (!some) {
      const alone = this.#alone(node, some);
      return el("span", { class: `confidence${alone ? " none" : ""}` }, alone ? "no partner" : "another nesting");
    }
    const { confidence, reason } = some[0];
    const bar = el("i", {});
    bar.style.width = `${Math.round(100 * confidence)}%`;
    return el("span", { class: "confidence", title: `${reason}, ${confidence.toFixed(2)}` }, el("em", {}, reason), el("span", { class: "bar" }, bar), el("b", {}, confidence.toFixed(2)));
  }

  /** Whether a layer lacks a partner that it should have: one that only holds others may have none. */
  #alone(node, some) {
    if (some) return false;
    const known = this.trees.store.head.coverage?.unmatched_layers?.[this.which];
    return known ? known.includes(node.path) : !node.children.length && node.path !== ROOT;
  }

  #hover(path) {
    this.trees.light(this.which, path);
    this.trees.on.hover(path === null ? null : this.trees.rowOf(this.which, path));
  }
}

function push(map, key, value) {
  if (map.has(key)) map.get(key).push(value);
  else map.set(key, [value]);
}
