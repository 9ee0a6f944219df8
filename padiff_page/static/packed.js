// Lines of steps whose figures are packed: of a step's diffs some stand whole, the others are rows of a table. A line
// names the sites and kinds (what many diffs have alike) that no line before it has named.

const FIGURES = ["max_abs", "max_rel", "mean_abs", "rel_l2", "l2.reference", "l2.candidate", "judged.value", "judged.limit"];
const MEASURED = FIGURES.map((name) => name.split("."));

// Codes that are no numbers; the others are figures on a logarithmic scale.
const ZERO = 0;
const ABSENT = 1;
const SPECIAL = [0, undefined, null, "inf", "-inf"];
const NUMBERS = 16;
const LOWEST = 300;
const EACH = 109;
// The values of all codes, with the digits that are true; made when they are first needed.
const VALUES = new Map();

function valueOf(code) {
  if (code < SPECIAL.length) return SPECIAL[code];
  let value = VALUES.get(code);
  if (value === undefined) VALUES.set(code, (value = Number((2 ** ((code - NUMBERS) / EACH - LOWEST)).toPrecision(4))));
  return value;
}

export class Packed {
  constructor() {
    this.sites = [];
    this.kinds = [];
  }

  /** Take over what a line names. */
  learn(line) {
    for (const name of ["sites", "kinds"]) {
      const [at, found] = line[name] ?? [0, []];
      found.forEach((one, k) => (this[name][at + k] = one));
    }
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
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Uint16Array.from({ length: bytes.length / 2 }, (_, k) => view.getUint16(2 * k, true));
}
