// Lines of steps whose figures are packed: of a step's diffs some stand whole, the others are rows of a table. A line
// names the sites and kinds (what many diffs have alike) that no line before it has named.

const STAGES = ["input", "weight", "forward", "loss", "backward", "grad", "update"];
const FIGURES = ["max_abs", "max_rel", "mean_abs", "rel_l2", "l2.reference", "l2.candidate", "judged.value", "judged.limit"];
const MEASURED = FIGURES.map((name) => name.split("."));

// Codes that are no numbers; the others are figures on a logarithmic scale.
const ZERO = 0;
const ABSENT = 1;
const SPECIAL = [0, undefined, null, "inf", "-inf"];
const NUMBERS = 16;
const LOWEST = 300;
const EACH = 109;
// The numbers of all codes; NaN where there is none.
const VALUES = Float64Array.from({ length: 1 << 16 }, (_, code) => {
  if (code < NUMBERS) return [0, NaN, NaN, Infinity, -Infinity][code] ?? NaN;
  return 2 ** ((code - NUMBERS) / EACH - LOWEST);
});

/** What a code stands for, with the digits that are true. */
function valueOf(code) {
  return code < SPECIAL.length ? SPECIAL[code] : Number(VALUES[code].toPrecision(4));
}

export class Packed {
  constructor() {
    this.sites = [];
    this.kinds = [];
    this.facts = []; // of each kind, what a picture needs
  }

  /** Take over what a line names. */
  learn(line) {
    for (const name of ["sites", "kinds"]) {
      const [at, found] = line[name] ?? [0, []];
      found.forEach((one, k) => (this[name][at + k] = name === "sites" ? siteOf(one) : one));
    }
    for (let k = this.facts.length; k < this.kinds.length; k++) this.facts.push(factsOf(this.kinds[k]));
  }

  /** A line that was learnt, with all of its diffs. */
  whole(line) {
    const { packed } = line;
    if (!packed) return line;
    const count = packed.rows.reduce((sum, [first, end]) => sum + end - first, 0);
    const table = unpacked(packed.figures ?? packed.times);
    const rows = this.#rows(packed, table, count);
    const diffs = [];
    let place = 0;
    let row = 0;
    while (diffs.length < count + line.diffs.length) diffs.push(packed.at[place] === diffs.length ? line.diffs[place++] : rows[row++]);
    return { ...line, diffs };
  }

  /** Call for each row of a packed line, without making objects: site's number, times the allowed, facts, bit-equal. */
  each(packed, call) {
    const table = unpacked(packed.figures ?? packed.times);
    const folded = !packed.figures;
    const count = table.length / (folded ? 2 : 1 + FIGURES.length);
    let row = 0;
    for (const [first, end] of packed.rows) {
      for (let number = first; number < end; number++, row++) {
        const facts = this.facts[table[row]];
        const equal = table[count + row] === ZERO && facts.measured;
        call(number, folded ? VALUES[table[count + row]] : excess(facts, table, row, count), facts, equal);
      }
    }
  }

  #rows(packed, table, count) {
    const rows = [];
    for (const [first, end] of packed.rows) {
      for (let number = first; number < end; number++) {
        const row = rows.length;
        const [stage, reference, candidate, view] = this.sites[number];
        const diff = { stage, reference, candidate, ...this.kinds[table[row]] };
        if (view) diff.view = view;
        if (packed.figures) measure(diff, table, row, count);
        else fold(diff, table[count + row]);
        rows.push(diff);
      }
    }
    return rows;
  }
}

/** A site as a line names it: the stage's number, sites without it, 0 for a candidate's that is the reference's. */
function siteOf([number, reference, candidate, view]) {
  if (typeof number === "string") return [number, reference, candidate, view]; // as it is
  const stage = STAGES[number];
  const [one, other] = [reference, candidate === 0 ? reference : candidate].map((name) => name?.replace("//", () => `/${stage}/`) ?? null);
  return [stage, one, other, view];
}

/** Of a kind: whether it passed, was judged, and measured from tensors; how it stands to the first diff. */
function factsOf(kind) {
  const faulty = Boolean(kind.problem) && !kind.passed;
  return { passed: kind.passed, judged: Boolean(kind.judged), endless: faulty, measured: !kind.basis, standing: kind.standing };
}

/** As `timesAllowed` of the whole diff. */
function excess(facts, table, row, count) {
  if (!facts.judged) return facts.passed ? NaN : Infinity;
  if (facts.endless) return Infinity;
  const value = VALUES[table[(FIGURES.length - 1) * count + row]];
  const limit = VALUES[table[FIGURES.length * count + row]];
  if (limit === 0) return value === 0 ? 0 : Infinity;
  return facts.passed ? Math.min(value / limit, 1) : value / limit;
}

function measure(diff, table, row, count) {
  if (diff.judged) diff.judged = { ...diff.judged };
  MEASURED.forEach(([outer, inner], k) => {
    const value = valueOf(table[(k + 1) * count + row]);
    if (value === undefined) return;
    if (inner) (diff[outer] ??= {})[inner] = value;
    else diff[outer] = value;
  });
}

/** Of old steps of a large log there is only how many times the allowed a diff is. */
function fold(diff, code) {
  diff.allowed_because = diff.judged?.allowed_because;
  delete diff.judged;
  if (code !== ABSENT) diff.times = valueOf(code);
  if (code === ZERO && !diff.basis) diff.max_abs = 0;
}

function unpacked(text) {
  const letters = atob(text);
  const codes = new Uint16Array(letters.length >> 1);
  for (let k = 0; k < codes.length; k++) codes[k] = letters.charCodeAt(2 * k) | (letters.charCodeAt(2 * k + 1) << 8);
  return codes;
}
