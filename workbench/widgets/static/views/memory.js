// The panel of memory in use, by class, and of its peak.

import { make, refill, swatch, write } from "../dom.js";
import { ranksWithin } from "../format.js";
import { Sheet } from "../sheet.js";
import { highestPeak, memoryEntries, peakWords } from "../words.js";
import { MAX_AREAS, drawMemory, memoryHeight } from "./draw_memory.js";
import { makePanel } from "./panel.js";

/** @import { Moment, PeakInfo } from "../messages.js" */
/** @import { RunModel } from "../model.js" */
/** @import { History } from "../series.js" */
/** @import { Scene } from "./scene.js" */

const LABEL_LETTERS = 13;

export class MemoryView {
  /** @param {(us: number) => void} onPeak called with the time of the peak when its button is pressed */
  constructor(onPeak) {
    const { box, note, hint } = makePanel("memory in use, by class");
    this.box = box;
    this.note = note;
    this.hint = hint;
    this.onPeak = onPeak;
    this.sheet = new Sheet(box, "fw-scrub fw-memory");
    this.legend = make("div", "fw-legend");
    this.peak = make("button", "fw-peak");
    this.peakNote = make("span");
    box.append(this.legend);
    this.peak.title = "move the cursor to the peak";
    this.peak.hidden = true;
    note.append(this.peak, this.peakNote);
  }

  /**
   * @param {RunModel} model
   * @param {Moment | null} at
   * @param {History} history
   * @param {Scene} scene
   */
  draw(model, at, history, scene) {
    const groups = model.groups
      .map((ranks, k) => ({ label: ranksWithin(ranks, LABEL_LETTERS), series: history.memory[k], peak: model.peaks[k] }))
      .flatMap(({ label, series, peak }) => (series ? [{ label, series, peak }] : []));
    this.sheet.paint(memoryHeight(groups.length), (pen, wide, high) => { drawMemory(pen, wide, high, { ...scene, groups }); });
    this.drawPeak(highestPeak(groups.flatMap(({ peak }) => peak ?? [])), groups.length, model.clocks.others);
    const entries = memoryEntries(at, model.history.classes);
    refill(this.legend, entries, () => entries.map(({ words, colour, size }) => swatch(words, colour, size)));
  }

  /**
   * @param {PeakInfo | null} peak
   * @param {number} numGroups
   * @param {string} clock
   */
  drawPeak(peak, numGroups, clock) {
    const more = numGroups > MAX_AREAS ? `and ${numGroups - MAX_AREAS} more groups of ranks` : "";
    this.peak.hidden = !peak;
    write(this.peakNote, peak ? ["", ...[clock, peak.text, more].filter(Boolean)].join(" \u00b7 ") : "");
    if (!peak) return;
    write(this.peak, peakWords(peak));
    this.peak.onclick = () => { this.onPeak(peak.t_us); };
  }
}
