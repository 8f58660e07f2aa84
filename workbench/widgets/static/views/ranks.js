// The card of the ranks: how they are and what they do.

import { make, refill, write } from "../dom.js";
import { rankLines } from "../words.js";
import { makeCard } from "./panel.js";

/** @import { Moment } from "../messages.js" */
/** @import { RunModel } from "../model.js" */

const MAX_LINES = 4; // of the card; it scrolls to further ones

export class RanksView {
  constructor() {
    const { box, note } = makeCard("ranks");
    this.box = box;
    this.list = make("div", "fw-ranks");
    this.late = make("span", "fw-late");
    note.append(this.late);
    box.append(this.list);
  }

  /**
   * @param {RunModel} model
   * @param {Moment | null} at
   * @param {boolean} isLive
   */
  draw({ health, groups, late }, at, isLive) {
    const lines = rankLines(health, at, isLive);
    const most = groups.flat().length + Number(health.length > 0); // a fixed number: nothing below moves
    this.list.style.setProperty("--fw-lines", String(Math.min(Math.max(most, 1), MAX_LINES)));
    refill(this.list, lines, () => lines.map(({ state, label, text }) => {
      const row = make("div", "fw-rank"), dot = make("span", `fw-dot fw-${state ? state.replace(" ", "-") : "then"}`);
      const doing = make("span", "fw-doing", text);
      doing.title = text;
      row.append(dot, make("span", "", label), doing);
      return row;
    }));
    write(this.late, isLive || !at ? late : "");
    this.late.title = late;
  }
}
