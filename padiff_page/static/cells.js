// A row of cells that grows by a column for each step, with its maxima over 8 and over 64 columns: a row of ten thousand
// steps is drawn without looking at each.

const FIRST = 32;

export class Cells {
  constructor() {
    this.levels = [new Uint8Array(FIRST), new Uint8Array(FIRST >> 3), new Uint8Array(1)];
  }

  /** Put a code, unless there is a larger one. */
  put(column, code) {
    if (column >= this.levels[0].length) this.#grow(column + 1);
    for (let k = 0; k < 3; k++) {
      const level = this.levels[k];
      const place = column >> (3 * k);
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
    this.levels = this.levels.map((level, k) => {
      const larger = new Uint8Array(Math.max(size >> (3 * k), 1));
      larger.set(level);
      return larger;
    });
  }
}
