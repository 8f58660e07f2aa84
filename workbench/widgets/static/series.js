// Columns that grow: what the panels draw over time.

import { CATEGORIES } from "./events.js";

const MAX_POINTS = 60000; // of one series; of more the older half is forgotten

/** Columns that grow; `width` numbers of a column stand for one entry. */
export class Series {
  constructor(columns) {
    this.columns = columns; // name -> [typed array, width]
    this.length = 0;
    for (const [name, [Type, width]] of Object.entries(columns)) this[name] = new Type(64 * width);
  }

  push(entry) {
    if (this.length === MAX_POINTS) this.forget();
    for (const [name, [Type, width]] of Object.entries(this.columns)) {
      if ((this.length + 1) * width > this[name].length) {
        const grown = new Type(2 * this[name].length);
        grown.set(this[name]);
        this[name] = grown;
      }
      if (width === 1) this[name][this.length] = entry[name];
      else this[name].set(entry[name], this.length * width);
    }
    this.length += 1;
  }

  forget() {
    const half = this.length >> 1;
    for (const [name, [, width]] of Object.entries(this.columns)) this[name].copyWithin(0, half * width);
    this.length -= half;
  }

  /** Position of the last entry whose `column` is at most `value`; -1 if there is none. */
  last(column, value) {
    const values = this[column];
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= value) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }
}

/** Add the table of memory to a series per group. */
export function fillMemory(series, { t, bytes, group }) {
  t.forEach((when, k) => {
    series[group[k]] ??= new Series({ t: [Float64Array, 1], bytes: [Float32Array, CATEGORIES.length] });
    series[group[k]].push({ t: when, bytes: bytes.subarray(k * CATEGORIES.length, (k + 1) * CATEGORIES.length) });
  });
}

/** Add the table of states to a series per group and unit. */
export function fillStates(series, { t, unit, group, state }) {
  t.forEach((when, k) => {
    const units = (series[group[k]] ??= []);
    units[unit[k]] ??= new Series({ t: [Float64Array, 1], state: [Uint8Array, 1] });
    units[unit[k]].push({ t: when, state: state[k] });
  });
}
