// Rectangles of a track as columns: searched, sorted and merged. Times are microseconds from the run's start.

import { sure } from "../sure.js";

export const MAX_STRADDLING = 64; // items of one track that may overlap at one instant

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
export function columnsOf({ start, end, bytes, arrowFrom, unit, kind, exposed }) {
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
export function sorted(items) {
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
export function mergeOrder(first, second) {
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
export function merge(values, length, from, added, order) {
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
