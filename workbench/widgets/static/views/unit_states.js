// The panel of the states of units.

import { make, swatch, write } from "../dom.js";
import { UNIT_STATES } from "../events.js";
import { ranksInWords } from "../format.js";
import { Sheet } from "../sheet.js";
import { sure } from "../sure.js";
import { dotted, unshardedWords } from "../words.js";
import { drawStates, unitHeight } from "./draw_states.js";
import { makePanel } from "./panel.js";

/** @import { Moment } from "../messages.js" */
/** @import { RunModel } from "../model.js" */
/** @import { History } from "../series.js" */
/** @import { Scene } from "./scene.js" */

const MAX_UNITS = 200;

export class UnitStatesView {
  constructor() {
    const { box, note, hint } = makePanel("units");
    this.box = box;
    this.note = note;
    this.hint = hint;
    this.sheet = new Sheet(box, "fw-scrub fw-states");
    const legend = make("div", "fw-legend");
    legend.append(...UNIT_STATES.map(({ words, colour }) => swatch(words, colour)));
    box.append(legend);
  }

  /**
   * @param {RunModel} model
   * @param {Moment | null} at
   * @param {History} history
   * @param {Scene} scene
   */
  draw(model, at, history, scene) {
    const found = history.states[0] ?? [], now = at?.ranks[0]?.units;
    const units = model.order.filter((unit) => found[unit]?.length).slice(0, MAX_UNITS)
      .map((unit) => ({ name: sure(model.units[unit]), series: sure(found[unit]), now: now?.[unit] }));
    const height = units.length * unitHeight(units.length) + 2;
    this.sheet.paint(height, (pen, wide, high) => { drawStates(pen, wide, high, { ...scene, units }); });
    const [first] = model.groups, drawn = first && model.groups.length > 1 ? `showing ${ranksInWords(first)}` : "";
    const unsharded = unshardedWords(model, at);
    write(this.note, dotted([unsharded, drawn, model.clocks.others]));
    this.note.title = unsharded;
  }
}
