// The cards with a number per step, and the effect of the last changed setting.

import { make, refill, write } from "../dom.js";
import { KIND, KINDS, UNIT_STATE, UNIT_STATES } from "../events.js";
import { Sheet } from "../sheet.js";
import { NONE, changeTable, stepNumber } from "../words.js";
import { drawLine } from "./draw_line.js";
import { makeCard } from "./panel.js";

/** @import { Moment } from "../messages.js" */
/** @import { RunModel } from "../model.js" */
/** @import { StepValue } from "../words.js" */
/** @import { Skin } from "./scene.js" */

const LINE_HEIGHT = 40; // pixels
const CARDS = /** @type {const} */ ([
  ["loss", "loss", UNIT_STATES[UNIT_STATE.SHARDED].colour],
  ["step time", "ms", KINDS[KIND.OPTIMIZER].colour],
  ["exposed", "exposed", KINDS[KIND.WAIT].colour],
]);

/**
 * @typedef {{ box: HTMLElement, value: StepValue, colour: string, number: HTMLElement, note: HTMLElement, sheet: Sheet }} StepCard
 */

export class StepsView {
  constructor() {
    /** @type {StepCard[]} */
    this.cards = CARDS.map(([title, value, colour]) => {
      const { box, note } = makeCard(title), number = make("div", "fw-number", NONE);
      box.append(number);
      return { box, value, colour, number, note, sheet: new Sheet(box, "") };
    });
    this.change = make("div", "fw-change");
  }

  /**
   * @param {RunModel} model
   * @param {Moment | null} at
   * @param {boolean} isLive
   * @param {Skin} skin
   */
  draw(model, at, isLive, skin) {
    const { steps } = model, step = isLive || !at ? null : model.stepAt(at);
    const here = step === null ? steps.length - 1 : steps.numbered(step);
    for (const { value, colour, number, note, sheet } of this.cards) {
      write(note, here >= 0 ? `step ${steps.columns.step[here]}` : "");
      write(number, stepNumber(steps, value, here));
      sheet.paint(LINE_HEIGHT, (pen, width, height) => { drawLine(pen, width, height, { steps, value, colour, at: step, skin }); });
    }
    this.drawChange(model);
  }

  /** @param {RunModel} model */
  drawChange({ change }) {
    refill(this.change, change, () => {
      if (!change) return [];
      const { heading, columns, rows } = changeTable(change), table = make("table"), head = make("tr");
      head.append(...columns.map((word) => make("th", "", word)));
      table.append(head, ...rows.map(([name, ...numbers]) => {
        const line = make("tr");
        line.append(make("th", "", name), ...numbers.map((number) => make("td", "", number)));
        return line;
      }));
      return [make("div", "fw-turned", heading), table];
    });
  }
}
