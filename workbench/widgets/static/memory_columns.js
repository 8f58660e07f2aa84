// The memory of a group of ranks for each pixel of a picture: however many changes fall into it, the most is drawn.

import { CATEGORIES, CATEGORY } from "./events.js";
import { lastUpTo } from "./series.js";
import { sure } from "./sure.js";

/** @import { Axis } from "./axis.js" */
/** @import { Memory } from "./series.js" */

/** @typedef {{ columns: Float64Array, totals: Float64Array, pixels: number }} Areas `totals`: -1 where nothing is known */

/**
 * For each pixel the moment with the most bytes: `[pixels + 1][classes]`, and the total in use.
 * @param {Memory} series
 * @param {Axis} axis
 * @returns {Areas}
 */
export function memoryColumns(series, axis) {
  const pixels = Math.ceil(axis.width), { t, length } = series;
  const columns = new Float64Array((pixels + 1) * CATEGORIES.length), totals = new Float64Array(pixels + 1).fill(-1);
  let filled = -1;
  for (let k = Math.max(lastUpTo(t, length, axis.t0), 0); k < length && sure(t[k]) <= axis.t1; k++) {
    const from = Math.max(Math.floor(axis.x(sure(t[k])) - axis.left), 0);
    const until = k + 1 < length ? Math.floor(axis.x(sure(t[k + 1])) - axis.left) : pixels;
    const bytes = series.bytes(k);
    const total = bytes.reduce((sum, part) => sum + part, 0) - sure(bytes[CATEGORY.RESERVED]);
    for (let x = Math.min(from, pixels); x <= Math.min(until, pixels); x++) {
      if (x <= filled && sure(totals[x]) >= total) continue;
      columns.set(bytes, x * CATEGORIES.length);
      totals[x] = total;
    }
    filled = Math.max(filled, Math.min(until, pixels));
  }
  return { columns, totals, pixels };
}

/**
 * The most bytes of all pixels, with those that are reserved.
 * @param {Areas} areas
 */
export function highest({ columns, totals }) {
  let most = 0;
  totals.forEach((total, x) => {
    if (total >= 0) most = Math.max(most, total + sure(columns[x * CATEGORIES.length + CATEGORY.RESERVED]));
  });
  return most;
}
