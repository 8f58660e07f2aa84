// The list of breakpoints: each can be switched and cleared.

import { make } from "../dom.js";
import { sure } from "../sure.js";

/** @import { BreakpointState } from "../messages.js" */

/** @typedef {{ item: HTMLElement, box: HTMLInputElement, clear: HTMLButtonElement }} BreakpointRow */

export class BreakpointsView {
  /**
   * @param {(word: string, argument: string) => void} press
   * @param {HTMLElement} fallback gets the focus when the last breakpoint with the focus is cleared
   */
  constructor(press, fallback) {
    this.press = press;
    this.fallback = fallback;
    this.box = make("div", "fw-stops");
    this.list = make("ul");
    /** @type {Map<number, BreakpointRow>} */
    this.rows = new Map(); // by the number of the breakpoint
    this.list.setAttribute("aria-label", "Breakpoints");
    this.box.append(make("h4", "", "Breakpoints"), this.list);
    this.box.hidden = true;
  }

  /**
   * Show the breakpoints. The row of one that stays is kept, and with it the focus.
   * @param {readonly BreakpointState[]} breakpoints
   */
  draw(breakpoints) {
    const ids = new Set(breakpoints.map(({ id }) => id));
    const focused = [...this.rows.values()].findIndex(({ item }) => item.matches(":focus-within"));
    const isLost = focused >= 0 && !ids.has(sure([...this.rows.keys()][focused]));
    for (const [id, { item }] of this.rows) {
      if (ids.has(id)) continue;
      item.remove();
      this.rows.delete(id);
    }
    for (const breakpoint of breakpoints) {
      let row = this.rows.get(breakpoint.id);
      if (!row) {
        row = this.build(breakpoint);
        this.rows.set(breakpoint.id, row);
        this.list.append(row.item);
      }
      row.box.checked = breakpoint.is_on;
      row.item.classList.toggle("fw-off", !breakpoint.is_on);
    }
    this.box.hidden = !this.rows.size;
    if (!isLost) return;
    const left = [...this.rows.values()]; // keyboard users continue next to what was cleared
    (left[Math.min(focused, left.length - 1)]?.clear ?? this.fallback).focus();
  }

  /**
   * @param {BreakpointState} breakpoint
   * @returns {BreakpointRow}
   */
  build({ id, text }) {
    const item = make("li"), label = make("label"), box = make("input"), clear = make("button", "", "\u2715");
    box.type = "checkbox";
    box.onchange = () => { this.press(box.checked ? "break on" : "break off", String(id)); };
    label.append(box, make("span", "", text));
    clear.title = "Clear";
    clear.setAttribute("aria-label", `Clear breakpoint ${text}`);
    clear.onclick = () => { this.press("break clear", String(id)); };
    item.append(label, clear);
    return { item, box, clear };
  }
}
