// A row of cells that grows by a column for each step, with its maxima over 4, 16, 64, ... columns: a row of ten thousand
// steps is drawn with a few reads for each pixel.

const FIRST = 64;
const LEVELS = 5;
/** A level holds the maxima of 4 cells of the level below it. */
const SHIFT = 2;

/** Which level to read where a pixel is so many columns wide. */
export function levelFor(columns) {
  let level = 0;
  while (level < LEVELS - 1 && columns >= 1 << (SHIFT * (level + 1))) level++;
  return level;
}

export class Cells {
  constructor() {
    this.levels = sized(FIRST);
  }

  /** Put a code, unless there is a larger one. */
  put(column, code) {
    if (column >= this.levels[0].length) this.#grow(column + 1);
    for (let k = 0; k < LEVELS; k++) {
      const level = this.levels[k];
      const place = column >> (SHIFT * k);
      if (level[place] >= code) return; // and so are those above
      level[place] = code;
    }
  }

  at(column) {
    const own = this.levels[0];
    return column < own.length ? own[column] : 0;
  }

  /** The largest code of columns from `start` up to and without `end`. */
  most(start, end) {
    let most = 0;
    const own = this.levels[0];
    for (let k = start; k < Math.min(end, own.length); k++) if (own[k] > most) most = own[k];
    return most;
  }

  #grow(columns) {
    let size = this.levels[0].length;
    while (size < columns) size *= 2;
    const larger = sized(size);
    larger.forEach((level, k) => level.set(this.levels[k]));
    this.levels = larger;
  }
}

function sized(columns) {
  return Array.from({ length: LEVELS }, (_, k) => new Uint8Array(Math.max(columns >> (SHIFT * k), 1)));
}

/** The first cell and the one after the last that each of `count` pixels is of, on a level. */
export function spans(count, first, columns, end, level) {
  const [starts, ends] = [new Int32Array(count), new Int32Array(count)];
  for (let x = 0; x < count; x++) {
    const start = Math.floor(first + x * columns);
    const last = Math.max(Math.min(Math.ceil(first + (x + 1) * columns), end), start + 1) - 1;
    starts[x] = start >> (SHIFT * level);
    ends[x] = (last >> (SHIFT * level)) + 1;
  }
  return { starts, ends };
}

/** Fold a row's codes into a line of pixels, by their maximum. */
export function fold(line, codes, { starts, ends }) {
  for (let x = 0; x < line.length; x++) {
    let most = line[x];
    for (let k = starts[x]; k < ends[x]; k++) {
      const code = codes[k];
      if (code > most) most = code;
    }
    line[x] = most;
  }
}
