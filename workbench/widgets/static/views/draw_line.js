// Draws a number per step as a line.

import { sure } from "../sure.js";

/** @import { Steps } from "../series.js" */
/** @import { Pen } from "../sheet.js" */
/** @import { StepValue } from "../words.js" */
/** @import { Skin } from "./scene.js" */

const STEPS_SHOWN = 400;

/**
 * Draw a line over the last steps.
 * @param {Pen} pen
 * @param {number} width
 * @param {number} height
 * @param {{ steps: Steps, value: StepValue, colour: string, at: number | null, skin: Skin }} what `at`: number of a step
 */
export function drawLine(pen, width, height, { steps, value, colour, at, skin }) {
  const low = 4, room = height - 8, from = Math.max(steps.length - STEPS_SHOWN, 0), { columns } = steps;
  const model = columns.model[at === null ? steps.length - 1 : Math.max(steps.numbered(at), 0)];
  const all = []; // of one model: the numbers of another are another curve
  for (let k = from; k < steps.length; k++) if (columns.model[k] === model) all.push(k);
  const known = all.filter((k) => Number.isFinite(columns[value][k]));
  if (!known.length) return;
  const values = known.map((k) => sure(columns[value][k]));
  const least = Math.min(...values), most = Math.max(...values), range = most - least || Math.abs(most) || 1;
  const first = sure(columns.step[sure(all[0])]), span = Math.max(sure(columns.step[sure(all.at(-1))]) - first, 1);
  const x = (/** @type {number} */ k) => 3 + ((sure(columns.step[k]) - first) / span) * (width - 8);
  const base = most === least ? least - range / 2 : least;
  const y = (/** @type {number} */ k) => low + room * (1 - (sure(columns[value][k]) - base) / range);
  Object.assign(pen, { strokeStyle: colour, lineWidth: 1.75, lineJoin: "round" });
  pen.beginPath();
  for (const [place, k] of known.entries()) {
    if (place) pen.lineTo(x(k), y(k));
    else pen.moveTo(x(k), y(k));
  }
  pen.stroke();
  const here = at === null ? all.at(-1) : all.findLast((k) => sure(columns.step[k]) <= at);
  if (here === undefined) return;
  if (at !== null) {
    pen.fillStyle = skin.accent;
    pen.fillRect(Math.round(x(here)) - 0.5, 0, 1.5, height);
  }
  if (!Number.isFinite(columns[value][here])) return; // it is not on the line
  pen.fillStyle = at === null ? colour : skin.accent;
  pen.beginPath();
  pen.arc(x(here), y(here), 3, 0, 2 * Math.PI);
  pen.fill();
}
