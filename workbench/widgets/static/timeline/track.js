// One row of a timeline, such as rank 0's collectives: its items, in order of their start.

import { sure } from "../sure.js";
import { ColourSums } from "./colour_sums.js";
import { MAX_STRADDLING, columnsOf, gallop, merge, mergeOrder, sorted } from "./items.js";

/** @import { Column, Items } from "./items.js" */

/** @typedef {{ name: string, rank: number, label?: string }} TrackName */

/** One row: the columns of its items, of which the first `length` entries are valid. */
export class Track {
  /** @param {TrackName} name */
  constructor({ name, rank, label }) {
    this.name = name;
    this.rank = rank;
    this.label = label ?? `rank ${rank}`;
    this.length = 0;
    this.capacity = 0;
    this.start = new Float64Array(0);
    this.end = new Float64Array(0);
    this.bytes = new Float64Array(0);
    this.arrowFrom = new Float64Array(0);
    this.unit = new Int16Array(0);
    this.kind = new Uint8Array(0);
    this.exposed = new Uint8Array(0);
    this.reach = new Float64Array(0); // latest end so far
    this.lane = new Uint8Array(0); // 0: the whole row; 1 and 2: its halves
    this.sums = new ColourSums();
  }

  /** @param {Items} items */
  append(items) {
    const added = sorted(items), count = added.start.length;
    if (!count) return;
    const first = sure(added.start[0]), from = gallop(this.start, this.length, this.after(first), first);
    this.reserve(this.length + count);
    const order = mergeOrder(this.start.slice(from, this.length), added.start);
    const columns = columnsOf(added);
    columnsOf(this).forEach((values, place) => {
      const mine = sure(columns[place]);
      if (from === this.length) values.set(mine, from);
      else merge(values, this.length, from, mine, order);
    });
    this.length += count;
    this.derive(from);
    this.sums.dropFrom(from);
  }

  /**
   * Drop the first items.
   * @param {number} count
   */
  forget(count) {
    for (const values of [...columnsOf(this), this.reach, this.lane]) values.copyWithin(0, count, this.length);
    this.length -= count;
    this.sums.dropFrom(0);
  }

  /**
   * A position near the end from which to search for `start`: added items are usually the latest.
   * @param {number} start
   */
  after(start) {
    let back = 1;
    while (back < this.length && sure(this.start[this.length - back]) >= start) back *= 2;
    return Math.max(this.length - back, 0);
  }

  /** @param {number} wanted */
  reserve(wanted) {
    if (wanted <= this.capacity) return;
    const capacity = (this.capacity = Math.max(wanted, 2 * this.capacity, 64));
    const grown = /** @type {<C extends Column>(values: C, grown: C) => C} */ ((values, found) => {
      found.set(values.subarray(0, this.length));
      return found;
    });
    this.start = grown(this.start, new Float64Array(capacity));
    this.end = grown(this.end, new Float64Array(capacity));
    this.bytes = grown(this.bytes, new Float64Array(capacity));
    this.arrowFrom = grown(this.arrowFrom, new Float64Array(capacity));
    this.unit = grown(this.unit, new Int16Array(capacity));
    this.kind = grown(this.kind, new Uint8Array(capacity));
    this.exposed = grown(this.exposed, new Uint8Array(capacity));
    this.reach = grown(this.reach, new Float64Array(capacity));
    this.lane = grown(this.lane, new Uint8Array(capacity));
  }

  /**
   * Update `reach` and `lane`: overlapping items alternate between the halves of the row.
   * @param {number} from
   */
  derive(from) {
    for (let k = from; k < this.length; k++) {
      const before = k ? sure(this.reach[k - 1]) : -Infinity;
      this.reach[k] = Math.max(before, sure(this.end[k]));
      if (sure(this.start[k]) >= before) this.lane[k] = 0;
      else {
        if (!this.lane[k - 1]) this.lane[k - 1] = 1;
        this.lane[k] = 3 - sure(this.lane[k - 1]);
      }
    }
  }

  /**
   * `[first, last)`: positions that contain all items visible from t0 to t1.
   * @param {number} t0
   * @param {number} t1
   * @returns {[number, number]}
   */
  within(t0, t1) {
    return [gallop(this.reach, this.length, 0, t0), gallop(this.start, this.length, 0, t1)];
  }

  /**
   * Positions of items whose begin or end may be the next one after t, or the last one before it.
   * @param {number} t
   */
  *near(t) {
    const next = gallop(this.start, this.length, 0, t);
    for (let k = Math.max(next - MAX_STRADDLING, 0); k < Math.min(next + 4, this.length); k++) yield k;
  }

  /**
   * Position of the item at t, the one that began last; -1 if there is none.
   * @param {number} t
   */
  at(t) {
    const last = gallop(this.start, this.length, 0, t + 1e-9);
    for (let k = last - 1; k >= Math.max(last - MAX_STRADDLING, 0); k--) if (sure(this.end[k]) > t) return k;
    return -1;
  }

  /**
   * Mark a collective as exposed: compute waited for a part of it.
   * @param {number} k
   * @param {number} from of the wait
   * @param {number} to of the wait
   */
  expose(k, from, to) {
    const waited = Math.min(sure(this.end[k]), to) - Math.max(sure(this.start[k]), from);
    if (waited <= 0) return;
    const lasted = sure(this.end[k]) - sure(this.start[k]);
    this.exposed[k] = Math.max(2, sure(this.exposed[k]), Math.round((255 * waited) / lasted));
    this.sums.dropFrom(k);
  }
}
