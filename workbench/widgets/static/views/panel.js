// The frame of a part of the dashboard: a title, a note beside it and a hint.

import { make } from "../dom.js";

/** @typedef {{ box: HTMLElement, note: HTMLElement, hint: HTMLElement }} Panel */

/**
 * A panel over the whole width.
 * @param {string} title
 * @returns {Panel}
 */
export function makePanel(title) {
  const box = make("div", "fw-panel"), heading = make("h4", "", title);
  const note = make("span", "fw-note"), hint = make("span", "fw-hint");
  heading.append(note, hint);
  box.append(heading);
  return { box, note, hint };
}

/**
 * A card, several of which are side by side.
 * @param {string} title
 */
export function makeCard(title) {
  const box = make("div", "fw-card"), heading = make("h4", "", title), note = make("span", "fw-note");
  heading.append(note);
  box.append(heading);
  return { box, note };
}
