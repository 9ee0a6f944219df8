// What is known of a comparison: the report without its steps, and a line for each step, as `diffs.jsonl` has them.
// Of each diff only what the pictures need is kept; the rest of a line is read again when somebody asks for it.

import { codeOf } from "./codes.js";
import { numberOf } from "./format.js";
import { Cells } from "./cells.js";
import { Packed } from "./packed.js";
import { LOOP, Tree } from "./tree.js";

export const STAGES = ["input", "weight", "forward", "loss", "backward", "grad", "update"];
/** The worst of all stages, beside them. */
export const ALL = "all";

// Of further faults so many are marked.
const FURTHER = 200;

/** How many times the allowed a diff is; NaN where nothing was judged. */
export function timesAllowed(diff) {
  if (diff.times !== undefined) return numberOf(diff.times);
  const judged = diff.judged;
  if (!judged) return diff.passed ? NaN : Infinity;
  if (diff.problem && !diff.passed) return Infinity;
  const value = numberOf(judged.value);
  const limit = numberOf(judged.limit);
  if (limit === 0) return value === 0 ? 0 : Infinity;
  return diff.passed ? Math.min(value / limit, 1) : value / limit; // packed figures are rounded
}

/** Whether a first diff is a setting, which no tensor shows (yet). */
export function isDeclared(first) {
  return first.site === null;
}

class Site {
  constructor(stage, reference, candidate, node) {
    Object.assign(this, { stage, reference, candidate, node });
    const [layer, slot] = parted(reference ?? candidate, stage);
    Object.assign(this, { layer, slot });
    this.other = reference && candidate ? parted(candidate, stage)[0] : null;
    this.times = new Float32Array(16).fill(NaN);
    this.firstBeyond = null; // column
  }

  put(column, times, passed) {
    if (column >= this.times.length) {
      const larger = new Float32Array(Math.max(column + 1, 2 * this.times.length)).fill(NaN);
      larger.set(this.times);
      this.times = larger;
    }
    // A site of several processes has a diff of each: the worst one stands.
    const known = this.times[column];
    if (!(known >= times)) this.times[column] = times;
    if (!passed && (this.firstBeyond === null || column < this.firstBeyond)) this.firstBeyond = column;
  }
}

/** Layer and slot of a site such as `encoder.0/forward/output.0#1`. */
function parted(site, stage) {
  const at = site.indexOf(`/${stage}/`);
  return at < 0 ? [site, ""] : [site.slice(0, at), site.slice(at + stage.length + 2)];
}

export class Store {
  /** `details` gives the parsed line of a step, by the place that `addLine` was given. */
  constructor(details) {
    this.readAgain = details;
    this.head = {};
    this.steps = []; // numbers, by column
    this.places = [];
    this.passed = [];
    this.sites = [];
    this.tree = new Tree();
    this.stages = new Map(); // stage -> what came of it
    this.firstDiff = null;
    this.columns = new Map();
    this.bySite = new Map();
    this.packed = new Packed();
    this.byNumber = []; // sites, as packed lines number them
    this.others = []; // as the report has them
    this.further = []; // cells of faults that do not follow from the first diff, where the report tells them
  }

  setHead(report) {
    this.head = report;
    this.#first(report.first_diff);
    this.#others(report.independent);
    const types = new Map();
    for (const [path, type] of report.models?.reference?.layers ?? []) types.set(path, type);
    for (const [path, type] of report.models?.candidate?.layers ?? []) types.set(`\n${path}`, type);
    this.types = types;
    for (const node of this.tree.all()) node.type = types.get(node.key) ?? "";
  }

  typeOf(side, path) {
    return this.types?.get(side === "candidate" ? `\n${path}` : path) ?? "";
  }

  /** Add a step; returns its column, or null where it is there already. */
  addLine(given, place) {
    this.packed.learn(given);
    if (this.columns.has(given.step)) return null;
    const column = this.steps.length;
    this.#first(given.first_diff);
    this.#others(given.independent);
    if (column === 0) this.#executionOrder(this.packed.whole(given).diffs);
    const before = this.tree.byKey.size;
    for (const diff of given.diffs) {
      const site = this.site(diff.stage, diff.reference, diff.candidate);
      const times = timesAllowed(diff);
      const compared = Boolean(diff.reference && diff.candidate && (diff.judged || !diff.passed));
      const equal = compared && diff.max_abs === 0 && !diff.basis;
      this.put(site, column, times, diff.passed, compared, equal);
      this.#isFurther(site, column, diff.standing);
    }
    if (given.packed) {
      this.packed.each(given.packed, (number, times, facts, equal) => {
        const site = (this.byNumber[number] ??= this.site(...this.packed.sites[number]));
        const compared = Boolean(site.reference && site.candidate && (facts.judged || !facts.passed));
        this.put(site, column, times, facts.passed, compared, equal && compared);
        this.#isFurther(site, column, facts.standing);
      });
    }
    this.addStep(given.step, given.passed ?? given.diffs.every((diff) => diff.passed), place);
    if (this.tree.byKey.size !== before) this.tree.sort();
    return column;
  }

  #isFurther(site, column, standing) {
    if (standing === "new" && this.further.length < FURTHER) this.further.push({ node: site.node, column, stage: site.stage });
  }

  /** What a tensor shows stands before what the runs only declare differently. */
  #first(found) {
    if (found && (!this.firstDiff || (isDeclared(this.firstDiff) && !isDeclared(found)))) this.firstDiff = found;
  }

  /** Faults that do not follow from the first diff: of all steps in a report, of each in its line. */
  #others(found = []) {
    for (const one of found) {
      if (this.others.length < FURTHER && !this.others.some((known) => known.message === one.message)) this.others.push(one);
    }
  }

  /** End the column that `put` wrote to. */
  addStep(number, passed, place) {
    this.columns.set(number, this.steps.length);
    this.steps.push(number);
    this.passed.push(passed);
    this.places.push(place);
  }

  site(stage, reference, candidate) {
    const key = `${stage}\n${reference}\n${candidate}`;
    const known = this.bySite.get(key);
    if (known) return known;
    const side = reference ? "reference" : "candidate";
    const [path] = parted(reference ?? candidate, stage);
    const site = new Site(stage, reference, candidate, this.layerNode(path, side));
    site.index = this.sites.length;
    this.sites.push(site);
    this.bySite.set(key, site);
    site.node.sites ??= [];
    site.node.sites.push(site);
    return site;
  }

  /** The row of a layer. One that only the candidate has is distinguished from a reference's of the same name. */
  layerNode(path, side) {
    const key = side === "candidate" && path !== LOOP ? `\n${path}` : path;
    const node = this.tree.node(path, key);
    node.side = side;
    node.type ||= this.types?.get(key) ?? "";
    if (path === LOOP) node.order = 1e9;
    return node;
  }

  put(site, column, times, passed, compared, equal) {
    site.put(column, times, passed);
    const code = codeOf(times, passed, compared, equal);
    const stage = site.stage;
    let known = this.stages.get(stage);
    if (!known) this.stages.set(stage, (known = { compared: 0, differ: 0, worst: -1, worstAt: null }));
    known.compared += compared || !passed;
    known.differ += !passed;
    if (times > known.worst) Object.assign(known, { worst: times, worstAt: [site, column] });
    for (const cells of (site.cells ??= cellsFor(site))) cells.put(column, code);
  }

  /** The cells of a row as it is shown: of all that is inside where it is folded. */
  cells(node, stage) {
    const some = node.open && node.children.length ? node.own : node.folded;
    return some[stageIndex(stage)];
  }

  /** The whole diff of a site in a step. */
  async diff(site, column) {
    const line = await this.line(column);
    const found = line.diffs.filter(
      (diff) => diff.stage === site.stage && diff.reference === site.reference && diff.candidate === site.candidate,
    );
    const excess = (diff) => {
      const times = timesAllowed(diff);
      return Number.isNaN(times) ? -1 : times;
    };
    return found.sort((a, b) => excess(b) - excess(a))[0] ?? null;
  }

  /** The line of a step, read again; the last one is kept. */
  async line(column) {
    if (this.lastLine?.[0] !== column) this.lastLine = [column, this.packed.whole(await this.readAgain(this.places[column], column))];
    return this.lastLine[1];
  }

  /** Where the first diff is: its site and column; null where no tensor shows it, or its step is not there yet. */
  firstCell() {
    const first = this.firstDiff;
    const column = first ? this.columns.get(first.step) : undefined;
    if (column === undefined) return null;
    const given = first.site;
    if (given) {
      const site = this.bySite.get(`${first.stage}\n${given.reference}\n${given.candidate}`);
      if (site) return { site, column };
    }
    const site = this.sites.find(
      (one) =>
        one.stage === first.stage &&
        one.firstBeyond === column &&
        (one.layer === first.reference || one.layer === first.candidate),
    );
    return site ? { site, column } : null;
  }

  /** The worst site of a row in a stage and some columns: [site, column], or null where there is none. */
  worst(node, stage, start, end) {
    let worst = null;
    let most = -1;
    const visit = (one) => {
      for (const site of one.sites ?? []) {
        if (stage !== ALL && site.stage !== stage) continue;
        for (let column = start; column < end; column++) {
          const times = site.times[column];
          const beyond = site.firstBeyond !== null && column >= site.firstBeyond;
          const rank = Number.isNaN(times) || times === undefined ? -0.5 : times + (beyond && times > 1 ? 1 : 0);
          if (rank > most) [worst, most] = [[site, column], rank];
        }
      }
      if (!(node.open && node.children.length)) one.children.forEach(visit);
    };
    visit(node);
    return worst;
  }

  /** Layers are shown in the order in which the first step called them; what is inside of a layer ends before it. */
  #executionOrder(diffs) {
    for (const stage of ["forward", ...STAGES]) {
      diffs.forEach((diff, k) => {
        if (diff.stage !== stage) return;
        const side = diff.reference ? "reference" : "candidate";
        const node = this.layerNode(parted(diff.reference ?? diff.candidate, stage)[0], side);
        const late = stage === "forward" ? 0 : 1e6;
        if (node.order === Infinity) node.order = late + k;
      });
    }
    this.tree.sort();
  }
}

function stageIndex(stage) {
  return stage === ALL ? STAGES.length : STAGES.indexOf(stage);
}

/** All cells that a site's codes go to: of its layer, and of the layers that this one is inside of. */
function cellsFor(site) {
  const lists = [site.node.own];
  for (let node = site.node; node.parent; node = node.parent) lists.push(node.folded);
  return lists.flatMap((list) => [cellsOf(list, site.stage), cellsOf(list, ALL)]);
}

function cellsOf(list, stage) {
  const index = stageIndex(stage);
  return (list[index] ??= new Cells());
}
