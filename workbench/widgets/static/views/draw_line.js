// Draws a number per step as a line, with a dot at the step that is shown.

import { stepLine } from "../step_line.js";

/** @import { Steps } from "../series.js" */
/** @import { Pen } from "../sheet.js" */
/** @import { StepValue } from "../words.js" */
/** @import { Skin } from "./scene.js" */

/**
 * @param {Pen} pen
 * @param {number} width
 * @param {number} height
 * @param {{ steps: Steps, value: StepValue, colour: string, at: number | null, skin: Skin }} what `at`: number of a step
 */
export function drawLine(pen, width, height, { steps, value, colour, at, skin }) {
  const { points, here } = stepLine(steps, value, at, { width, height });
  if (!points.length) return;
  Object.assign(pen, { strokeStyle: colour, lineWidth: 1.75, lineJoin: "round" });
  pen.beginPath();
  for (const point of points) pen.lineTo(...point);
  pen.stroke();
  if (!here) return;
  if (at !== null) {
    pen.fillStyle = skin.accent;
    pen.fillRect(Math.round(here.x) - 0.5, 0, 1.5, height);
  }
  if (!here.point) return; // it is not on the line
  pen.fillStyle = at === null ? colour : skin.accent;
  pen.beginPath();
  pen.arc(...here.point, 3, 0, 2 * Math.PI);
  pen.fill();
}
