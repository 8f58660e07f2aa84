// The rows of a timeline: their items, in order of their start, and the mean colours of their pixels.
//
// Times are microseconds from the run's start. A *track* is one row (rank 0's collectives); its *items* are rectangles.
//
// Let A(t) be the area of a track's colours before t: the sum over its items of colour x time. A pixel from t to u has
// the colour (A(u) - A(t)) / (u - t), exactly, at any zoom. A is precomputed for every BLOCK-th item (the coarse
// level), so a pixel takes one search and at most BLOCK additions.

import { sure } from "./sure.js";
/** @import { Look } from "./look.js" */

const BLOCK = 8;
export const MAX_STRADDLING = 64; // items of one track that may overlap at one instant
const FAINTEST = 0.4; // opacity of an almost empty pixel
const MAX_TRIES = 64; // additions to a rank after which the collective of a wait is no longer expected

/** @typedef {Float64Array | Int16Array | Uint8Array} Column */

/**
 * Rectangles of one track: one entry per rectangle in each column.
 * @typedef {object} Items
 * @property {Float64Array} start
 * @property {Float64Array} end
 * @property {Float64Array} bytes
 * @property {Float64Array} arrowFrom of a wait: when its collective began; NaN: unknown, or no wait
 * @property {Int16Array} unit -1: none or several
 * @property {Uint8Array} kind
 * @property {Uint8Array} exposed 0: hidden behind compute; 1: compute waited for it, for an unknown time; 2 to 255:
 *   compute waited for this share of it, in 1/255, at its end, which has the colour of a wait
 */

/** @typedef {{ name: string, rank: number, label?: string }} TrackName */

/** @typedef {{ track: Track, k: number }} Place */

/**
 * First position from `from` on with `values[position] >= value`; doubles its stride, then halves it.
 * @param {Float64Array} values
 * @param {number} length
 * @param {number} from
 * @param {number} value
 */
export function gallop(values, length, from, value) {
  if (from >= length || sure(values[from]) >= value) return from;
  let low = from, stride = 1;
  while (low + stride < length && sure(values[low + stride]) < value) {
    low += stride;
    stride *= 2;
  }
  let high = Math.min(low + stride, length);
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sure(values[middle]) < value) low = middle;
    else high = middle;
  }
  return high;
}

/**
 * @param {Items} items
 * @returns {Column[]}
 */
function columnsOf({ start, end, bytes, arrowFrom, unit, kind, exposed }) {
  return [start, end, bytes, arrowFrom, unit, kind, exposed];
}

/**
 * The items at these positions, in this order.
 * @param {Items} items
 * @param {Iterable<number>} places
 * @returns {Items}
 */
export function picked(items, places) {
  const order = Uint32Array.from(places);
  return {
    start: Float64Array.from(order, (k) => sure(items.start[k])),
    end: Float64Array.from(order, (k) => sure(items.end[k])),
    bytes: Float64Array.from(order, (k) => sure(items.bytes[k])),
    arrowFrom: Float64Array.from(order, (k) => sure(items.arrowFrom[k])),
    unit: Int16Array.from(order, (k) => sure(items.unit[k])),
    kind: Uint8Array.from(order, (k) => sure(items.kind[k])),
    exposed: Uint8Array.from(order, (k) => sure(items.exposed[k])),
  };
}

/**
 * The items in order of their start.
 * @param {Items} items
 */
function sorted(items) {
  const { start } = items;
  let isSorted = true;
  for (let k = 1; k < start.length && isSorted; k++) isSorted = sure(start[k]) >= sure(start[k - 1]);
  const order = (/** @type {number} */ a, /** @type {number} */ b) => sure(start[a]) - sure(start[b]) || a - b;
  return isSorted ? items : picked(items, Array.from(start.keys()).sort(order));
}

/**
 * The merge order of two sorted lists, as positions; those of the second list follow those of the first.
 * @param {Float64Array} first
 * @param {Float64Array} second
 */
function mergeOrder(first, second) {
  const order = new Int32Array(first.length + second.length);
  for (let a = 0, b = 0, k = 0; k < order.length; k++) {
    order[k] = b >= second.length || (a < first.length && sure(first[a]) <= sure(second[b])) ? a++ : first.length + b++;
  }
  return order;
}

/**
 * Merge `values` from position `from` up to `length` with `added`, in this order, into `values` from `from` on.
 * @param {Column} values
 * @param {number} length
 * @param {number} from
 * @param {Column} added
 * @param {Int32Array} order
 */
function merge(values, length, from, added, order) {
  const old = values.slice(from, length);
  for (let k = 0; k < order.length; k++) {
    const place = sure(order[k]);
    values[from + k] = sure(place < old.length ? old[place] : added[place - old.length]);
  }
}

/**
 * The share of an item that is drawn as exposed.
 * @param {number} exposed
 */
export function share(exposed) {
  return exposed > 1 ? exposed / 255 : 0;
}

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
    this.summed = 0; // blocks of `coarse` that are up to date
    this.coarse = new Float64Array(0); // per block red, green, blue and time before it
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
    this.summed = Math.min(this.summed, Math.floor(from / BLOCK));
  }

  /**
   * Drop the first items.
   * @param {number} count
   */
  forget(count) {
    for (const values of [...columnsOf(this), this.reach, this.lane]) values.copyWithin(0, count, this.length);
    this.length -= count;
    this.summed = 0;
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
   * Bring `coarse` up to date.
   * @param {Look} look
   */
  sumUp(look) {
    const blocks = Math.floor(this.length / BLOCK) + 1;
    if (this.summed >= blocks) return;
    if (this.coarse.length < 4 * blocks) {
      const grown = new Float64Array(8 * blocks);
      grown.set(this.coarse);
      this.coarse = grown;
    }
    const { start, end, kind, exposed, length, coarse } = this, { red, green, blue } = look;
    const [redE, greenE, blueE] = look.exposed;
    const begin = Math.max(this.summed - 1, 0);
    const [r0 = 0, g0 = 0, b0 = 0, sum0 = 0] = this.summed ? coarse.subarray(4 * begin, 4 * begin + 4) : [];
    let r = r0, g = g0, b = b0, sum = sum0;
    for (let n = begin * BLOCK; n <= length; n++) {
      if (n % BLOCK === 0) coarse.set([r, g, b, sum], (4 * n) / BLOCK);
      if (n === length) break;
      const time = Math.max(sure(end[n]) - sure(start[n]), 0), k = sure(kind[n]);
      const bare = time * share(sure(exposed[n])), hidden = time - bare;
      r += hidden * sure(red[k]) + bare * redE;
      g += hidden * sure(green[k]) + bare * greenE;
      b += hidden * sure(blue[k]) + bare * blueE;
      sum += time;
    }
    this.summed = blocks;
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
    this.summed = Math.min(this.summed, Math.floor(k / BLOCK));
  }
}

/** All tracks. A wait marks how long compute waited for its collective; it may be added before the collective. */
export class Tracks {
  /** @param {readonly TrackName[]} names */
  constructor(names = []) {
    /** @type {Track[]} */
    this.all = [];
    /** @type {{ track: Track, from: number, start: number, end: number, tries: number }[]} */
    this.pending = []; // waits whose collective is not there yet
    this.add(names);
  }

  /** @param {readonly TrackName[]} names of more tracks */
  add(names) {
    this.all.push(...names.map((name) => new Track(name)));
  }

  /** Number of items. */
  get count() {
    return this.all.reduce((sum, { length }) => sum + length, 0);
  }

  /**
   * @param {number} index of the track
   * @param {Items} items
   */
  append(index, items) {
    const track = sure(this.all[index]), { arrowFrom, start, end } = items;
    track.append(items);
    arrowFrom.forEach((from, k) => {
      if (!Number.isNaN(from)) this.pending.push({ track, from, start: sure(start[k]), end: sure(end[k]), tries: 0 });
    });
    this.pending = this.pending.filter((wait) => {
      if (wait.track.rank !== track.rank) return true;
      const found = this.issue(wait.track, wait.from);
      if (!found) return (wait.tries += 1) < MAX_TRIES;
      found.track.expose(found.k, wait.start, wait.end);
      return false;
    });
  }

  /**
   * The collective of a wait's rank that began at `start`.
   * @param {Track} wait
   * @param {number} start
   * @returns {Place | null}
   */
  issue(wait, start) {
    /** @type {Place | null} */
    let best = null;
    let distance = 2; // microseconds: times may be rounded
    for (const track of this.all) {
      if (track.rank !== wait.rank || track === wait) continue;
      const near = gallop(track.start, track.length, 0, start);
      for (const k of [near - 1, near]) {
        const away = k >= 0 && k < track.length ? Math.abs(sure(track.start[k]) - start) : Infinity;
        if (away < distance) [best, distance] = [{ track, k }, away];
      }
    }
    return best;
  }

  /** Drop the earlier half of the items, by their start. */
  forget() {
    const before = (/** @type {number} */ t) => this.all.map(({ start, length }) => gallop(start, length, 0, t));
    const sum = (/** @type {number[]} */ counts) => counts.reduce((a, b) => a + b, 0);
    const half = this.count / 2, there = this.all.filter(({ length }) => length);
    let low = Math.min(...there.map(({ start }) => sure(start[0])));
    let high = Math.max(...there.map(({ start, length }) => sure(start[length - 1])));
    for (let k = 0; k < 60 && high > low; k++) {
      const middle = (low + high) / 2;
      if (sum(before(middle)) < half) low = middle;
      else high = middle;
    }
    before(high).forEach((count, k) => { sure(this.all[k]).forget(count); });
  }
}

/**
 * Fill `pixels[offset ...]`, one per `step` microseconds from t0 on, with the mean colours of a track.
 *
 * r, g, b and time are A at a pixel's right end: the sum over all items that begin before it (`before`), minus the
 * parts after it of items that overlap it. Plain numbers and no calls, so no `sure`: this runs for every pixel of every
 * frame. All positions are within their columns; `?? 0` only satisfies the compiler, and costs nothing.
 * @param {Track} track
 * @param {Uint32Array} pixels
 * @param {number} offset
 * @param {number} width
 * @param {number} t0
 * @param {number} step
 * @param {Look} look
 */
export function paint(track, pixels, offset, width, t0, step, look) {
  const { start, end, kind, exposed, reach, length, coarse } = track;
  const { red, green, blue } = look, [redE, greenE, blueE] = look.exposed;
  let next = gallop(start, length, 0, t0);
  let beforeR = 0, beforeG = 0, beforeB = 0, beforeTime = 0;
  let lastR = 0, lastG = 0, lastB = 0, lastTime = 0;
  let isFirst = true;
  for (let x = -1; x < width; x++) { // the first round computes A at t0
    const t = t0 + (x + 1) * step;
    if (!isFirst && (!next || (reach[next - 1] ?? 0) < t - step) && (next >= length || (start[next] ?? 0) >= t)) {
      // nothing here: skip to the next item; A does not change
      x = (next >= length ? width : Math.max(Math.floor(((start[next] ?? 0) - t0) / step), x + 1)) - 1;
      continue;
    }
    const until = gallop(start, length, next, t);
    if (isFirst || until - next > BLOCK) {
      const block = Math.floor(until / BLOCK), at = 4 * block;
      next = block * BLOCK;
      beforeR = (coarse[at] ?? 0);
      beforeG = (coarse[at + 1] ?? 0);
      beforeB = (coarse[at + 2] ?? 0);
      beforeTime = (coarse[at + 3] ?? 0);
    }
    for (; next < until; next++) {
      const lasts = (end[next] ?? 0) - (start[next] ?? 0), time = lasts > 0 ? lasts : 0;
      const k = (kind[next] ?? 0), e = (exposed[next] ?? 0);
      const bare = e > 1 ? (time * e) / 255 : 0, hidden = time - bare;
      beforeR += hidden * (red[k] ?? 0) + bare * redE;
      beforeG += hidden * (green[k] ?? 0) + bare * greenE;
      beforeB += hidden * (blue[k] ?? 0) + bare * blueE;
      beforeTime += time;
    }
    let r = beforeR, g = beforeG, b = beforeB, time = beforeTime;
    for (let over = next - 1; over >= 0 && (reach[over] ?? 0) > t && over >= next - MAX_STRADDLING; over--) {
      const rest = (end[over] ?? 0) - t;
      if (rest <= 0) continue;
      const k = (kind[over] ?? 0), e = (exposed[over] ?? 0);
      const tail = e > 1 ? (((end[over] ?? 0) - (start[over] ?? 0)) * e) / 255 : 0;
      const bare = tail < rest ? tail : rest, hidden = rest - bare; // the exposed part is at the end
      r -= hidden * (red[k] ?? 0) + bare * redE;
      g -= hidden * (green[k] ?? 0) + bare * greenE;
      b -= hidden * (blue[k] ?? 0) + bare * blueE;
      time -= rest;
    }
    const filled = time - lastTime;
    if (!isFirst && filled > step * 1e-6) {
      const alpha = Math.min(Math.max(filled / step, FAINTEST), 1);
      pixels[offset + x] = ((alpha * 255) << 24) | (clampByte((b - lastB) / filled) << 16) |
        (clampByte((g - lastG) / filled) << 8) | clampByte((r - lastR) / filled);
    }
    lastR = r;
    lastG = g;
    lastB = b;
    lastTime = time;
    isFirst = false;
  }
}

/** @param {number} value */
function clampByte(value) {
  return value < 0 ? 0 : value > 255 ? 255 : Math.round(value);
}

