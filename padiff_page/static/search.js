// The search field: layers of either model by their paths, types, or a part of either.

import { el, refill } from "./dom.js";

const SHOWN = 12;

export class Search {
  /** `pick` is called with the chosen row. */
  constructor(store, pick) {
    this.store = store;
    this.pick = pick;
    this.input = el("input", { type: "search", placeholder: "Find a layer", "aria-label": "Find a layer", spellcheck: "false", autocomplete: "off" });
    this.results = el("ul", { class: "results", hidden: true });
    this.element = el("div", { class: "search" }, this.input, el("kbd", {}, "/"), this.results);
    this.input.addEventListener("input", () => this.#show());
    this.input.addEventListener("keydown", (event) => this.#key(event));
    this.input.addEventListener("blur", () => setTimeout(() => (this.results.hidden = true), 150));
  }

  focus() {
    this.input.focus();
    this.input.select();
  }

  #matches() {
    const wanted = this.input.value.trim().toLowerCase();
    if (!wanted) return [];
    const partners = new Map();
    for (const one of this.store.head.models?.partners ?? []) {
      partners.set(one.reference, `${partners.get(one.reference) ?? ""} ${one.candidate}`);
    }
    const found = [];
    for (const node of this.store.tree.all()) {
      const other = partners.get(node.path) ?? "";
      if (`${node.path} ${node.type} ${other}`.toLowerCase().includes(wanted)) found.push({ node, other });
    }
    // The whole name before a part of it.
    const rank = ({ node }) => (node.path.toLowerCase() === wanted ? 0 : node.path.toLowerCase().startsWith(wanted) ? 1 : 2);
    return found.sort((a, b) => rank(a) - rank(b)).slice(0, SHOWN);
  }

  #show() {
    this.found = this.#matches();
    this.chosen = 0;
    this.#paint();
  }

  #paint() {
    this.results.hidden = !this.input.value.trim();
    refill(
      this.results,
      this.found.length ? null : el("li", { class: "nothing" }, "No such layer"),
      this.found.map(({ node, other }, k) =>
        el(
          "li",
          { class: k === this.chosen ? "on" : "", pointerdown: (event) => this.#take(event, node) },
          el("code", {}, node.path),
          el("span", { class: "type" }, node.type),
          other ? el("small", {}, other.trim()) : null,
        ),
      ),
    );
  }

  #take(event, node) {
    event.preventDefault();
    this.results.hidden = true;
    this.input.blur();
    this.pick(node);
  }

  #key(event) {
    const count = this.found?.length ?? 0;
    if (event.key === "ArrowDown" && count) this.chosen = (this.chosen + 1) % count;
    else if (event.key === "ArrowUp" && count) this.chosen = (this.chosen + count - 1) % count;
    else if (event.key === "Enter" && count) return this.#take(event, this.found[this.chosen].node);
    else if (event.key === "Escape") {
      this.input.value = "";
      this.results.hidden = true;
      this.input.blur();
      event.stopPropagation();
      return undefined;
    } else return undefined;
    event.preventDefault();
    this.#paint();
    return undefined;
  }
}
