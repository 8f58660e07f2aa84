// Where the line of a number per step is drawn. All sizes are pixels.

import { sure } from "./sure.js";

/** @import { Steps } from "./series.js" */
/** @import { StepValue } from "./words.js" */

/** @typedef {readonly [x: number, y: number]} Point */

const MAX_STEPS = 400; // shown
const LEFT = 3;
const RIGHT = 5;
const MARGIN = 4; // above and below

/**
 * The points of the line, without steps whose number is not finite; the place of the step `at`, or of the last one if
 * that is null; and whether there is a point.
 * @param {Steps} steps
 * @param {StepValue} value
 * @param {number | null} at number of a step
 * @param {{ width: number, height: number }} size
 * @returns {{ points: readonly Point[], here: { x: number, point: Point | null } | null }}
 */
export function stepLine(steps, value, at, { width, height }) {
  const { length, columns } = steps, numbers = columns[value];
  const model = columns.model[at === null ? length - 1 : Math.max(steps.numbered(at), 0)];
  const all = []; // of one model: the numbers of another are another curve
  for (let k = Math.max(length - MAX_STEPS, 0); k < length; k++) if (columns.model[k] === model) all.push(k);
  const known = all.filter((k) => Number.isFinite(numbers[k]));
  if (!known.length) return { points: [], here: null };
  const values = known.map((k) => sure(numbers[k]));
  const least = Math.min(...values), most = Math.max(...values), range = most - least || Math.abs(most) || 1;
  const base = most === least ? least - range / 2 : least; // a constant is in the middle
  const first = sure(columns.step[sure(all[0])]), span = Math.max(sure(columns.step[sure(all.at(-1))]) - first, 1);
  const x = (/** @type {number} */ k) => LEFT + ((sure(columns.step[k]) - first) / span) * (width - LEFT - RIGHT);
  const y = (/** @type {number} */ k) => MARGIN + (height - 2 * MARGIN) * (1 - (sure(numbers[k]) - base) / range);
  const point = (/** @type {number} */ k) => /** @type {const} */ ([x(k), y(k)]);
  const k = at === null ? all.at(-1) : all.findLast((step) => sure(columns.step[step]) <= at);
  const here = k === undefined ? null : { x: x(k), point: Number.isFinite(numbers[k]) ? point(k) : null };
  return { points: known.map(point), here };
}
