// The record of one rank: its rows, and the values after each of them.

import { lastUpTo } from "../series.js";
import { sure } from "../sure.js";

/** @typedef {Float64Array | Int32Array | Uint8Array} Column */

/**
 * The running sums of `steps`.
 * @param {Column} steps
 */
function summed(steps) {
  const found = new Float64Array(steps.length);
  let sum = 0;
  for (let k = 0; k < steps.length; k++) found[k] = sum += sure(steps[k]);
  return found;
}

/** Several values that change with rows, and their lookup after any row. */
export class ValueChanges {
  /**
   * @param {Column} rows for each value in turn, the rows after which it changes, -1 before all
   * @param {Column} values what it changes to
   * @param {Column} ends where the changes of each value end
   */
  constructor(rows, values, ends) {
    this.parts = Array.from(ends, (end, k) => {
      const from = k ? sure(ends[k - 1]) : 0;
      return { rows: rows.subarray(from, end), values: values.subarray(from, end) };
    });
  }

  /**
   * All values after a row.
   * @param {number} row
   */
  after(row) {
    return this.parts.map(({ rows, values }) => sure(values[lastUpTo(rows, rows.length, row)]));
  }

  /**
   * The changes of the rows after `first` up to `last`, in the order of the rows.
   * @param {number} first
   * @param {number} last
   */
  between(first, last) {
    const found = this.parts.flatMap(({ rows, values }, part) => {
      const from = lastUpTo(rows, rows.length, first) + 1, to = lastUpTo(rows, rows.length, last) + 1;
      return Array.from(rows.subarray(from, to), (row, k) => ({ row, part, value: sure(values[from + k]) }));
    });
    return found.sort((a, b) => a.row - b.row);
  }
}

/** The record of one rank. Times are nanoseconds from the view's origin. */
export class RankRecord {
  /**
   * @param {number} rank
   * @param {number} seq of its first row
   * @param {(name: string) => Column} column
   */
  constructor(rank, seq, column) {
    this.rank = rank;
    this.seq = seq;
    this.known = summed(column("known")); // arrival time of each row
    const hidden = summed(column("hidden"));
    this.shown = this.known.map((t, k) => t - sure(hidden[k])); // its place on the axis
    this.step = summed(column("step"));
    this.back = column("back");
    this.text = column("text");
    this.doing = column("doing");
    this.events = Int32Array.from([...column("event").keys()].filter((row) => column("event")[row]));
    this.bytes = new ValueChanges(column("bytes.row"), column("bytes.value"), column("bytes.ends"));
    this.units = new ValueChanges(column("units.row"), column("units.value"), column("units.ends"));
    this.length = this.known.length;
  }

  /**
   * The last row up to a time in `times`, `known` or `shown`; at least the first.
   * @param {Float64Array} times
   * @param {number} t
   */
  rowAt(times, t) {
    return Math.max(lastUpTo(times, this.length, t), 0);
  }

  /**
   * The row `by` events after row number `seq`, at most the first or last event.
   * @param {number} seq
   * @param {number} by
   */
  beside(seq, by) {
    const row = Math.min(Math.max(seq - this.seq, 0), this.length - 1), count = this.events.length;
    if (!count) return row;
    return sure(this.events[Math.min(Math.max(lastUpTo(this.events, count, row) + by, 0), count - 1)]);
  }
}
