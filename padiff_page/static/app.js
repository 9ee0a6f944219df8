// The page: its parts put together, and what is chosen on it.

import { timesOf, BEYOND, EQUAL, SKIPPED } from "./codes.js";
import { TensorCard } from "./card.js";
import { el, refill } from "./dom.js";
import { times } from "./format.js";
import { HeatMap } from "./heat.js";
import { placeOf, readPlace } from "./place.js";
import { scheme } from "./scheme.js";
import { Search } from "./search.js";
import { legend, stageTiles } from "./stages.js";
import { ALL } from "./store.js";
import { Trees } from "./trees.js";
import { verdictCard } from "./verdict.js";
import { around } from "./around.js";

// Rows that are unfolded at first, at most.
const ROWS = 40;

export class Page {
  /** `options`: lead, elements that stand in the head line; place, what the address keeps beside the cell. */
  constructor(root, store, options = {}) {
    this.root = root;
    this.store = store;
    this.options = options;
    this.stage = null;
    this.scheme = scheme;
    this.heat = new HeatMap(store, {
      select: (found) => this.choose(found),
      fold: (node) => this.fold(node),
      hover: (node) => this.trees.light("reference", node?.path ?? null),
      text: (found) => this.tip(found),
    });
    this.trees = new Trees(store, {
      hover: (path) => this.heat.light(path === null ? null : this.rowAt(path)),
      select: (path) => {
        const node = this.rowAt(path);
        if (node) this.choose({ node, column: null });
      },
    });
    this.card = new TensorCard(store, { close: () => this.close(), select: (chosen) => this.select(chosen), link: () => location.href });
    this.search = new Search(store, (node) => this.choose({ node, column: null }));
    this.parts = { verdict: el("div", {}), stages: el("div", {}), legend: el("div", {}), around: el("div", { class: "around" }), status: el("span", { class: "status" }) };
    this.said = el("div", { class: "said", "aria-live": "polite" });
    this.#build();
    this.#listen();
  }

  #build() {
    const tool = (text, title, click) => el("button", { type: "button", class: "quiet", title, click }, text);
    refill(
      this.root,
      el(
        "header",
        { class: "top" },
        el("span", { class: "brand" }, "padiff"),
        this.options.lead ?? null,
        (this.names = el("span", { class: "names" })),
        this.parts.status,
        el("span", { class: "grow" }),
        this.search.element,
      ),
      el(
        "main",
        {},
        this.parts.verdict,
        el(
          "section",
          { class: "card", id: "heat" },
          el(
            "div",
            { class: "title" },
            el("h2", {}, "Layers by steps"),
            el("span", { class: "grow" }),
            tool("Fold", "fold all layers", () => this.foldAll(false)),
            tool("Unfold", "unfold all layers", () => this.foldAll(true)),
            el("span", { class: "bar" }),
            tool("−", "zoom out (−)", () => this.heat.zoom(1 / 1.6)),
            tool("+", "zoom in (+)", () => this.heat.zoom(1.6)),
            tool("Fit", "all rows and steps (0)", () => this.heat.fit()),
          ),
          this.parts.stages,
          this.heat.element,
          this.parts.legend,
        ),
        el("section", { class: "card", id: "models" }, el("div", { class: "title" }, el("h2", {}, "Models side by side"), el("span", { class: "grow" }), el("small", {}, "how sure each pair is, and by what it was found")), this.trees.element),
        this.parts.around,
      ),
      this.card.element,
      this.said,
    );
  }

  /** The report is known, with or without its steps. */
  showHead() {
    const { store } = this;
    refill(this.names, el("b", {}, store.head.reference ?? "reference"), el("i", {}, "↔"), el("b", {}, store.head.candidate ?? "candidate"));
    refill(this.parts.around, around(store.head));
    this.trees.update();
    this.showVerdict();
  }

  /** Steps have come; `more` is how many. */
  showSteps() {
    const { store } = this;
    if (!this.unfolded && store.tree.byKey.size) {
      this.unfolded = true;
      store.tree.openTo(ROWS);
      store.firstCell()?.site.node.reveal();
      this.#stageAtFirst();
    }
    if (store.firstCell() && !this.heat.first) {
      const { site, column } = store.firstCell();
      this.heat.first = { node: site.node, column };
      site.node.reveal();
      if (!this.touched) this.setStage(site.stage);
    }
    const followed = this.heat.size && this.heat.view.x >= store.steps.length * this.heat.view.column - this.heat.plot.wide - 2 * this.heat.view.column;
    this.heat.update();
    if (followed && !this.heat.fits) this.heat.show(this.heat.rows[0], store.steps.length - 1);
    this.paintStages();
    this.trees.refresh();
    this.showVerdict();
    if (!this.arrived && location.hash) this.#fromAddress();
    this.arrived = true;
  }

  #stageAtFirst() {
    const first = this.store.firstDiff?.stage;
    const differing = [...this.store.stages].find(([, known]) => known.differ);
    const there = (stage) => stage && this.store.stages.has(stage);
    this.setStage(there(first) ? first : (differing?.[0] ?? ALL));
  }

  async showVerdict() {
    const { store } = this;
    const cell = store.firstCell();
    const key = JSON.stringify([store.firstDiff?.message ?? null, Boolean(cell), store.firstDiff ? store.others.length : store.steps.length, store.head.outcome]);
    if (key === this.verdictOf) return;
    this.verdictOf = key;
    const diff = cell ? await store.diff(cell.site, cell.column).catch(() => null) : null;
    refill(this.parts.verdict, verdictCard(store, diff, () => this.select(store.firstCell())));
  }

  paintStages() {
    refill(this.parts.stages, stageTiles(this.store, this.stage, (stage) => this.pickStage(stage), this.scheme.matches));
    refill(this.parts.legend, legend(this.store, this.scheme.matches));
  }

  setStage(stage) {
    this.stage = this.heat.stage = stage;
    this.paintStages();
    this.heat.draw();
  }

  pickStage(stage) {
    this.touched = true;
    this.setStage(stage);
    this.#toAddress();
  }

  fold(node) {
    node.open = !node.open;
    this.heat.update();
  }

  foldAll(open) {
    this.store.tree.openAll(open);
    if (!open) this.heat.view.row = Math.max(this.heat.view.row, 22);
    this.heat.update();
    if (!open) this.heat.layout();
  }

  /** The row of a layer of the reference, or of the candidate where only that has it. */
  rowAt(path) {
    const { byKey } = this.store.tree;
    return byKey.get(path) ?? byKey.get(`\n${path}`) ?? null;
  }

  /** A row and perhaps a column: the worst tensor there. */
  choose({ node, column, end }) {
    const { store } = this;
    this.touched = true;
    const all = column === null || column === undefined;
    const first = store.firstCell();
    let found = null;
    // Of a whole row, the first diff; else what is worst.
    if (all && first?.site.node === node) found = [first.site, first.column];
    else found = all ? store.worst(node, this.stage, 0, store.steps.length) : store.worst(node, this.stage, column, end ?? column + 1);
    if (!found && all) found = store.worst(node, ALL, 0, store.steps.length);
    if (found) this.select({ site: found[0], column: found[1] });
    else this.#mark(node, column ?? null);
  }

  /** Open the card of a tensor in a step. */
  select({ site, column }, address = true) {
    this.touched = true;
    if (this.stage !== ALL && this.stage !== site.stage) this.setStage(site.stage);
    this.chosen = { site, column };
    this.#mark(site.node, column);
    if (address) this.#toAddress();
    return this.card.open(site, column);
  }

  #mark(node, column) {
    node.reveal();
    this.heat.update();
    this.cursor = { node, column };
    this.heat.selected = { node, column };
    this.heat.show(node, column);
    this.trees.light("reference", node.path);
    this.said.textContent = `${node.path}${column === null ? "" : `, step ${this.store.steps[column]}`}`;
  }

  close(address = true) {
    this.card.close();
    this.chosen = null;
    this.heat.selected = null;
    this.heat.draw();
    if (address) this.#toAddress();
  }

  tip({ node, column, end }) {
    const { store, heat } = this;
    const cells = store.cells(node, this.stage);
    const code = cells ? cells.most(column, end) : 0;
    if (!code) return null;
    const about = code === EQUAL ? "bit-equal" : code === SKIPPED ? "not compared" : null;
    const found = store.worst(node, this.stage, column, end);
    const exact = found ? found[0].times[found[1]] : timesOf(code);
    const steps = end - column > 1 ? `steps ${store.steps[column]} to ${store.steps[end - 1]}` : `step ${store.steps[column]}`;
    return [
      el("b", {}, node.path),
      el("span", {}, `${this.stage === ALL ? "all stages" : this.stage}, ${steps}`),
      el("span", { class: code >= BEYOND ? "beyond" : "" }, about ?? `${times(exact)} allowed`),
      found && found[0].node !== node ? el("small", {}, `worst inside: ${found[0].layer}`) : found ? el("small", {}, found[0].slot) : null,
      heat.first?.node === node && heat.first.column >= column && heat.first.column < end ? el("em", {}, "first diff") : null,
    ].filter(Boolean);
  }

  #toAddress() {
    const { site = null, column = null } = this.chosen ?? {};
    const place = placeOf({ stage: this.stage, site, column }, this.store);
    for (const [name, value] of Object.entries(this.options.place ?? {})) place.set(name, value);
    const hash = `#${place}`;
    if (hash === location.hash) return;
    this.own = hash;
    location.hash = hash;
  }

  #fromAddress() {
    const found = readPlace(location.hash, this.store);
    if (found.stage && (this.store.stages.has(found.stage) || found.stage === ALL)) this.setStage(found.stage);
    if (found.site && found.column !== null) this.select(found, false);
    else this.close(false);
  }

  #listen() {
    const live = new AbortController();
    this.ended = live;
    const options = { signal: live.signal };
    window.addEventListener(
      "hashchange",
      () => {
        const own = this.own === location.hash;
        this.own = null;
        if (!own) this.#fromAddress();
      },
      options,
    );
    document.addEventListener("keydown", (event) => this.#key(event), options);
    this.scheme.addEventListener("change", () => (this.paintStages(), this.trees.refresh()), options);
  }

  #key(event) {
    const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const { heat, store } = this;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "/") this.search.focus();
    else if (event.key === "Escape") this.close();
    else if (event.key === "+" || event.key === "=") heat.zoom(1.6);
    else if (event.key === "-") heat.zoom(1 / 1.6);
    else if (event.key === "0") heat.fit();
    else if (moves[event.key] && heat.rows.length) this.#step(...moves[event.key], store, heat);
    else if (event.key === "Enter" && this.cursor && !(event.target instanceof HTMLButtonElement)) {
      this.choose({ node: this.cursor.node, column: this.cursor.column });
    } else return;
    event.preventDefault();
  }

  /** Move the marked cell; an open card follows. */
  #step(down, right, store, heat) {
    const from = this.cursor ?? heat.first ?? { node: heat.rows[0], column: 0 };
    const row = Math.min(Math.max((heat.placeOf.get(from.node) ?? 0) + (this.cursor ? down : 0), 0), heat.rows.length - 1);
    const column = Math.min(Math.max((from.column ?? 0) + (this.cursor ? right : 0), 0), store.steps.length - 1);
    const node = heat.rows[row];
    if (this.chosen) this.choose({ node, column });
    if (!this.chosen || this.cursor.node !== node) this.#mark(node, column);
  }

  /** Leave: another pair is shown. */
  end() {
    this.ended.abort();
    this.heat.resized.disconnect();
  }
}
