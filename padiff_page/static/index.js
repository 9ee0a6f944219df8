// The page in TensorBoard: it lists the pairs under the log folder, and follows one of them while it grows.

import { Page } from "./app.js";
import { el, refill } from "./dom.js";
import { Store } from "./store.js";
import { takeWords } from "./words.js";

// Milliseconds between two looks at what is new.
const EVERY = 2000;

async function got(route, values = {}) {
  const answer = await fetch(`./${route}?${new URLSearchParams(values)}`);
  if (!answer.ok) throw new Error(`${route}: ${answer.status}`);
  return answer.json();
}

class Live {
  constructor(root) {
    this.root = root;
    this.pairs = [];
    this.choice = el("select", { "aria-label": "pair", change: () => this.open(this.choice.value) });
  }

  async start() {
    const wanted = new URLSearchParams(location.hash.slice(1)).get("pair");
    for (;;) {
      try {
        this.pairs = (await got("pairs")).pairs;
        this.trouble = null;
      } catch (error) {
        this.trouble = error.message;
      }
      this.#options();
      if (!this.pair && this.pairs.length) await this.open(this.pairs.some((one) => one.name === wanted) ? wanted : this.pairs[0].name);
      else if (!this.pairs.length) refill(this.root, el("p", { class: "trouble" }, "No step is compared yet. `padiff watch`, `padiff compare --logdir` and callbacks with `logdir=` write here."));
      if (this.pair) await this.follow();
      await new Promise((resolve) => setTimeout(resolve, EVERY));
    }
  }

  #options() {
    const known = [...this.choice.options].map((one) => one.value).join("\n");
    if (known === this.pairs.map((one) => one.name).join("\n")) return;
    refill(this.choice, this.pairs.map((one) => el("option", { value: one.name }, `${one.name}${one.outcome ? ` · ${one.outcome}` : ""}`)));
    if (this.pair) this.choice.value = this.pair;
    this.choice.hidden = this.pairs.length < 2;
  }

  async open(name) {
    this.pair = name;
    this.choice.value = name;
    this.log = this.version = null;
    this.next = 0;
    this.page?.end();
    const { words } = await got("words", { pair: name });
    takeWords(words);
    document.documentElement.lang = Object.keys(words).length ? "zh" : "en";
    const store = new Store(async ([start, end]) => JSON.parse((await got("lines", { pair: name, start, end })).lines[0]));
    this.store = store;
    this.page = new Page(this.root, store, { lead: this.choice, place: { pair: name } });
    window.padiff = this.page;
    await this.follow();
  }

  /** Read what is new of the open pair. */
  async follow() {
    const { store, page, pair } = this;
    try {
      for (;;) {
        const part = await got("follow", { pair, start: this.next, version: this.version ?? "" });
        if (pair !== this.pair) return;
        if (this.log !== null && (part.log !== this.log || part.size < this.next)) return void (await this.open(pair)); // recorded anew
        this.log = part.log;
        if (part.report) {
          this.version = part.version;
          store.setHead(part.report);
          page.showHead();
        }
        for (const [start, end, text] of part.lines) {
          const line = parsed(text);
          if (Array.isArray(line?.diffs)) store.addLine(line, [start, end]);
        }
        this.next = part.next;
        if (part.lines.length && store.steps.length) page.showSteps();
        this.#say(`${store.steps.length.toLocaleString("en")} steps`, true);
        if (part.next >= part.size) return;
      }
    } catch (error) {
      this.#say(`waiting: ${error.message}`, false);
    }
  }

  #say(text, live) {
    refill(this.page.parts.status, el("i", { class: live ? "dot live" : "dot" }), text);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // a damaged line: the others are shown
  }
}

export async function render() {
  const style = el("link", { rel: "stylesheet", href: "./page.css" });
  const styled = new Promise((resolve) => style.addEventListener("load", resolve));
  document.head.append(style);
  document.documentElement.lang = "en";
  const root = el("div", { id: "padiff" });
  await styled;
  document.body.append(root);
  await new Live(root).start();
}
