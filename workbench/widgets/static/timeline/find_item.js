// Which item of the timeline is at a point, and which begin or end comes next.

import { sure } from "../sure.js";
import { MAX_STRADDLING } from "./items.js";
import { rowAt } from "./row_layout.js";

/** @import { Axis } from "../axis.js" */
/** @import { Items } from "./items.js" */
/** @import { Row } from "./row_layout.js" */
/** @import { Track } from "./track.js" */

/** @typedef {readonly [number, number]} Hold when ranks were held or idle, and for how long */

/** @typedef {{ row: Row, items: Items, k: number }} FoundItem an item of a row, ended or open */

const SLACK = 3; // pixels around an item that belong to it
const HOLD_REACH = 4; // pixels around the line of a hold

/**
 * The item at a point, or near it. Of several the nearest; of those at the same distance the one that began last. An
 * item that has not ended comes before those that have.
 * @param {{ rows: readonly Row[], axis: Axis, open: readonly (Items | null)[] }} picture
 * @param {number} x
 * @param {number} y
 * @returns {FoundItem | null}
 */
export function itemAt({ rows, axis, open }, x, y) {
  const place = rowAt(rows, y);
  if (place < 0 || x < axis.left) return null;
  const row = sure(rows[place]), { track } = row, t = axis.t(x), slack = (SLACK * axis.span) / axis.width;
  const otherHalf = y - row.y < row.height / 2 ? 2 : 1;
  const [first, last] = track.within(t - slack, t + slack);
  /** @type {FoundItem | null} */
  let best = null;
  let distance = Infinity;
  for (let k = Math.max(first, last - 4 * MAX_STRADDLING); k < last; k++) {
    const beside = Math.max(sure(track.start[k]) - t, t - sure(track.end[k]), 0);
    const away = beside + (track.lane[k] === otherHalf ? slack : 0);
    if (away <= distance && away <= slack) [best, distance] = [{ row, items: track, k }, away];
  }
  const items = open[row.index];
  items?.start.forEach((start, k) => {
    if (start - slack <= t && t <= sure(items.end[k]) + slack) best = { row, items, k };
  });
  return best;
}

/**
 * The hold at a point: its line is thin, and drawn over the items around it.
 * @param {readonly Hold[]} holds
 * @param {Axis} axis
 * @param {number} x
 */
export function holdAt(holds, axis, x) {
  return holds.find(([at]) => Math.abs(axis.x(at) - x) <= HOLD_REACH);
}

/**
 * The nearest begin or end of an item after t (or before it); null if there is none.
 * @param {readonly Track[]} tracks
 * @param {number} t
 * @param {1 | -1} direction
 */
export function nextEdge(tracks, t, direction) {
  let best = direction * Infinity;
  for (const track of tracks) {
    for (const k of track.near(t)) {
      for (const edge of [sure(track.start[k]), sure(track.end[k])]) {
        if ((edge - t) * direction > 0 && (edge - best) * direction < 0) best = edge;
      }
    }
  }
  return Number.isFinite(best) ? best : null;
}
