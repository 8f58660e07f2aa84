// One row of the timeline: its items, in order of their start, and the mean colours of its pixels.
//
// Let A(t) be the area of a track's colours before t: the sum over its items of colour x time. A pixel from t to u has
// the colour (A(u) - A(t)) / (u - t), exactly, whatever the zoom. A is summed up in advance for every BLOCK-th item (the
// coarse level), so a pixel takes one search and at most BLOCK additions.

export const BLOCK = 8;
export const MAX_STRADDLING = 64; // items of one track that may lie over one instant
const FAINTEST = 0.4; // opacity of a pixel in which hardly anything happened

/** First position from `from` on with `values[position] >= value`; doubles its stride, then halves. */
export function gallop(values, length, from, value) {
  if (from >= length || values[from] >= value) return from;
  let low = from, stride = 1;
  while (low + stride < length && values[low + stride] < value) {
    low += stride;
    stride *= 2;
  }
  let high = Math.min(low + stride, length);
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle;
    else high = middle;
  }
  return high;
}

export const COLUMNS = {
  start: Float64Array, end: Float64Array, bytes: Float64Array, arrowFrom: Float64Array, unit: Int16Array,
  kind: Uint8Array, exposed: Uint8Array,
};
const DERIVED = { reach: Float64Array, lane: Uint8Array }; // latest end so far; 0 all of the row, 1 and 2 its halves

export class Track {
  constructor({ name, rank, label }) {
    this.name = name;
    this.rank = rank;
    this.label = label ?? `rank ${rank}`;
    this.length = 0;
    this.forgotten = 0; // items before the first one
    this.capacity = 0;
    this.summed = 0; // blocks of `coarse` that are right
    this.coarse = new Float64Array(0); // per block red, green, blue and time before it
    this.open = null; // items that have not ended
    for (const [column, type] of Object.entries({ ...COLUMNS, ...DERIVED })) this[column] = new type(0);
  }

  append(items) {
    const added = sorted(items);
    const count = added.start.length;
    if (!count) return;
    const from = gallop(this.start, this.length, this.after(added.start[0]), added.start[0]);
    this.reserve(this.length + count);
    for (const column of Object.keys(COLUMNS)) this.merge(column, added, from, count);
    this.length += count;
    this.derive(from);
    this.summed = Math.min(this.summed, Math.floor(from / BLOCK));
  }

  /** Forget the first `count` items. */
  forget(count) {
    for (const column of Object.keys({ ...COLUMNS, ...DERIVED })) this[column].copyWithin(0, count, this.length);
    this.length -= count;
    this.forgotten += count;
    this.summed = 0;
  }

  /** A place near the end from which on to look for `start`: what is added is usually the latest. */
  after(start) {
    let back = 1;
    while (back < this.length && this.start[this.length - back] >= start) back *= 2;
    return Math.max(this.length - back, 0);
  }

  reserve(wanted) {
    if (wanted <= this.capacity) return;
    this.capacity = Math.max(wanted, 2 * this.capacity, 64);
    for (const [column, type] of Object.entries({ ...COLUMNS, ...DERIVED })) {
      const grown = new type(this.capacity);
      grown.set(this[column].subarray(0, this.length));
      this[column] = grown;
    }
  }

  merge(column, added, from, count) {
    const values = this[column];
    if (from === this.length) return values.set(added[column], from);
    const order = added.merged ??= mergeOrder(this.start.slice(from, this.length), added.start);
    const old = values.slice(from, this.length);
    for (let k = 0; k < order.length; k++) {
      values[from + k] = order[k] < old.length ? old[order[k]] : added[column][order[k] - old.length];
    }
    return count;
  }

  /** Latest end so far, and lanes: those that overlap take the halves of the row in turn. */
  derive(from) {
    for (let k = Math.max(from, 0); k < this.length; k++) {
      const before = k ? this.reach[k - 1] : -Infinity;
      this.reach[k] = Math.max(before, this.end[k]);
      if (this.start[k] >= before) this.lane[k] = 0;
      else {
        if (!this.lane[k - 1]) this.lane[k - 1] = 1;
        this.lane[k] = 3 - this.lane[k - 1];
      }
    }
  }

  /** Sum up what is not summed up yet; `look` holds the colours. */
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
    let [r, g, b, sum] = this.summed ? coarse.subarray(4 * begin, 4 * begin + 4) : [0, 0, 0, 0];
    for (let n = begin * BLOCK; n <= length; n++) {
      if (n % BLOCK === 0) {
        const at = (4 * n) / BLOCK;
        coarse[at] = r, coarse[at + 1] = g, coarse[at + 2] = b, coarse[at + 3] = sum;
      }
      if (n === length) break;
      const time = end[n] > start[n] ? end[n] - start[n] : 0, k = kind[n];
      const bare = time * share(exposed[n]), hidden = time - bare;
      r += hidden * red[k] + bare * redE;
      g += hidden * green[k] + bare * greenE;
      b += hidden * blue[k] + bare * blueE;
      sum += time;
    }
    this.summed = blocks;
  }

  /** `[first, last)`: positions between which everything lies that is seen from t0 to t1. */
  within(t0, t1) {
    return [gallop(this.reach, this.length, 0, t0), gallop(this.start, this.length, 0, t1)];
  }
}

/** The items in order of their start. */
function sorted(items) {
  const { start } = items;
  let isSorted = true;
  for (let k = 1; k < start.length && isSorted; k++) isSorted = start[k] >= start[k - 1];
  if (isSorted) return { ...items, merged: undefined };
  const order = Array.from(start.keys()).sort((a, b) => start[a] - start[b] || a - b);
  const found = {};
  for (const [column, type] of Object.entries(COLUMNS)) found[column] = type.from(order, (k) => items[column][k]);
  return found;
}

/** Positions, in order, in two sorted lists of which the second counts on after the first. */
function mergeOrder(first, second) {
  const order = new Int32Array(first.length + second.length);
  for (let a = 0, b = 0, k = 0; k < order.length; k++) {
    order[k] = b >= second.length || (a < first.length && first[a] <= second[b]) ? a++ : first.length + b++;
  }
  return order;
}

/** The share of an item that is drawn as exposed. */
export function share(exposed) {
  return exposed > 1 ? exposed / 255 : 0;
}

/**
 * Fill `pixels[offset ...]`, one per `step` microseconds from t0 on, with the mean colours of a track.
 *
 * r, g, b and time are A at a pixel's right end: what all items that begin before it sum up to (`before`) without what
 * those that lie over it have after it. Plain numbers and no calls: this runs for every pixel of every frame.
 */
export function paint(track, pixels, offset, width, t0, step, look) {
  const { start, end, kind, exposed, reach, length, coarse } = track;
  const { red, green, blue } = look, [redE, greenE, blueE] = look.exposed;
  let next = gallop(start, length, 0, t0);
  let beforeR = 0, beforeG = 0, beforeB = 0, beforeTime = 0;
  let lastR = 0, lastG = 0, lastB = 0, lastTime = 0;
  let isFirst = true;
  for (let x = -1; x < width; x++) { // the first round finds what A is at t0
    const t = t0 + (x + 1) * step;
    if (!isFirst && (!next || reach[next - 1] < t - step) && (next >= length || start[next] >= t)) {
      // nothing here: on to where something is; A stays as it is
      x = (next >= length ? width : Math.max(Math.floor((start[next] - t0) / step), x + 1)) - 1;
      continue;
    }
    const until = gallop(start, length, next, t);
    if (isFirst || until - next > BLOCK) {
      const block = Math.floor(until / BLOCK), at = 4 * block;
      next = block * BLOCK;
      beforeR = coarse[at], beforeG = coarse[at + 1], beforeB = coarse[at + 2], beforeTime = coarse[at + 3];
    }
    for (; next < until; next++) {
      const time = end[next] > start[next] ? end[next] - start[next] : 0, k = kind[next], e = exposed[next];
      const bare = e > 1 ? (time * e) / 255 : 0, hidden = time - bare;
      beforeR += hidden * red[k] + bare * redE;
      beforeG += hidden * green[k] + bare * greenE;
      beforeB += hidden * blue[k] + bare * blueE;
      beforeTime += time;
    }
    let r = beforeR, g = beforeG, b = beforeB, time = beforeTime;
    for (let over = next - 1; over >= 0 && reach[over] > t && over >= next - MAX_STRADDLING; over--) {
      const rest = end[over] - t;
      if (rest <= 0) continue;
      const k = kind[over], e = exposed[over], tail = e > 1 ? ((end[over] - start[over]) * e) / 255 : 0;
      const bare = tail < rest ? tail : rest, hidden = rest - bare; // the exposed end is the last to come
      r -= hidden * red[k] + bare * redE;
      g -= hidden * green[k] + bare * greenE;
      b -= hidden * blue[k] + bare * blueE;
      time -= rest;
    }
    const filled = time - lastTime;
    if (!isFirst && filled > step * 1e-6) {
      const alpha = Math.min(Math.max(filled / step, FAINTEST), 1);
      pixels[offset + x] = ((alpha * 255) << 24) | (clampByte((b - lastB) / filled) << 16) |
        (clampByte((g - lastG) / filled) << 8) | clampByte((r - lastR) / filled);
    }
    lastR = r, lastG = g, lastB = b, lastTime = time;
    isFirst = false;
  }
}

function clampByte(value) {
  return value < 0 ? 0 : value > 255 ? 255 : Math.round(value);
}

