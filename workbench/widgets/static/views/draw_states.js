// Draws the states of units over time, one row each.

import { UNIT_STATE, UNIT_STATES } from "../events.js";
import { shorten } from "../format.js";
import { lastUpTo } from "../series.js";
import { sure } from "../sure.js";
import { drawLines } from "./scene.js";

/** @import { Axis } from "../axis.js" */
/** @import { StateChanges } from "../series.js" */
/** @import { Pen } from "../sheet.js" */
/** @import { Scene } from "./scene.js" */

/** @typedef {{ name: string, series: StateChanges, now: number | undefined }} UnitRow `now`: its state at the cursor */

const STATES_HEIGHT = 300; // of all rows together, at most
const UNIT_HEIGHTS = /** @type {const} */ ([5, 20]);

/**
 * Height of one unit's row, with `count` rows.
 * @param {number} count
 */
export function unitHeight(count) {
  return Math.max(Math.min(Math.floor(STATES_HEIGHT / Math.max(count, 1)), UNIT_HEIGHTS[1]), UNIT_HEIGHTS[0]);
}

/**
 * @param {Pen} pen
 * @param {number} width
 * @param {number} height
 * @param {Scene & { units: UnitRow[] }} scene
 */
export function drawStates(pen, width, height, scene) {
  const { units, axis, skin, end } = scene;
  const each = unitHeight(units.length), last = Math.min(axis.x(end), width);
  const every = Math.ceil(14 / each);
  units.forEach(({ name, series, now }, place) => {
    const y = place * each;
    pen.fillStyle = skin.row;
    pen.fillRect(axis.left, y + 1, axis.width, each - 2);
    drawUnit(pen, series, { axis, y, each, last });
    if (now !== undefined) {
      pen.fillStyle = sure(UNIT_STATES[now]).colour;
      pen.fillRect(axis.left - 14, y + 2, 8, each - 4);
    }
    if (place % every) return;
    Object.assign(pen, { fillStyle: skin.ink, textAlign: "right", textBaseline: "middle" });
    pen.fillText(shorten(name, axis.left > 120 ? 20 : 10), axis.left - 20, y + each / 2 + 0.5);
  });
  drawLines(pen, height, scene);
}

/**
 * @param {Pen} pen
 * @param {StateChanges} series
 * @param {{ axis: Axis, y: number, each: number, last: number }} where
 */
function drawUnit(pen, { t, state: states, length }, { axis, y, each, last }) {
  for (let k = Math.max(lastUpTo(t, length, axis.t0), 0); k < length && sure(t[k]) <= axis.t1; k++) {
    const begin = Math.max(axis.x(sure(t[k])), axis.left);
    const end = Math.min(k + 1 < length ? axis.x(sure(t[k + 1])) : last, axis.left + axis.width, last);
    if (end <= begin) continue;
    const state = sure(states[k]), thin = state === UNIT_STATE.SHARDED && each > 8 ? each * 0.36 : 1; // it holds little
    pen.fillStyle = sure(UNIT_STATES[state]).colour;
    pen.fillRect(begin, y + thin, Math.max(end - begin, 0.7), each - 2 * thin);
  }
}
