// What all pictures over time share: each draws the time that the timeline shows, between the same horizontal positions,
// so that all have one axis and one cursor. Times are microseconds from the view's origin.

/** @import { Axis } from "../axis.js" */
/** @import { Pen } from "../sheet.js" */

/** @typedef {Record<"page" | "ink" | "soft" | "row" | "grid" | "accent" | "peak", string>} Skin colours of the page */

/**
 * @typedef {object} Scene
 * @property {Axis} axis
 * @property {readonly (readonly [number, number])[]} holds
 * @property {number | null} cursor
 * @property {number} end end of the known time
 * @property {Skin} skin
 */

/**
 * The colours of a dashboard: see dashboard.css.
 * @param {HTMLElement} root
 * @returns {Skin}
 */
export function skinOf(root) {
  const style = getComputedStyle(root);
  const css = (/** @type {string} */ name) => style.getPropertyValue(`--fw-${name}`).trim();
  return { page: css("page"), ink: css("ink"), soft: css("soft"), row: css("row"), grid: css("grid"),
    accent: css("accent"), peak: css("peak") };
}

/**
 * Draw the cursor, and thin lines where ranks were held and time is cut out.
 * @param {Pen} pen
 * @param {number} height
 * @param {Scene} scene
 */
export function drawLines(pen, height, { axis, holds, cursor, skin }) {
  pen.fillStyle = skin.soft;
  for (const [at] of holds.filter(([t]) => axis.shows(t))) {
    for (let y = 0; y < height; y += 5) pen.fillRect(Math.round(axis.x(at)), y, 1, 3);
  }
  if (cursor === null || !axis.shows(cursor)) return;
  pen.fillStyle = skin.accent;
  pen.fillRect(Math.round(axis.x(cursor)) - 0.5, 0, 1.5, height);
}
