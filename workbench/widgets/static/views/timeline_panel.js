// The panel of the timeline.

import { make, write } from "../dom.js";
import { createTimeline } from "../timeline/timeline.js";
import { dotted } from "../words.js";
import { makePanel } from "./panel.js";

/** @import { OpenSpan } from "../messages.js" */
/** @import { RunModel } from "../model.js" */
/** @import { Items } from "../timeline/items.js" */

const HOW = "drag to pan, Ctrl + wheel to zoom, drag the axis or an area above to move the cursor";

/**
 * @typedef {object} TimelineCalls
 * @property {(us: number) => void} onCursor
 * @property {() => void} onStop it no longer follows the run
 * @property {() => void} onDraw it will be drawn in the next frame, and may show another time
 */

export class TimelineView {
  /** @param {TimelineCalls} calls */
  constructor(calls) {
    const { box, note } = makePanel("timeline");
    this.calls = calls;
    this.box = box;
    this.note = note;
    this.place = make("div", "fw-timeline");
    box.append(this.place);
    this.chart = this.build();
    /** @type {readonly Items[] | null} */
    this.close = null; // drawn instead of the kept items
    this.drawNote("");
  }

  build() {
    const canvas = make("canvas"), { onCursor, onStop, onDraw } = this.calls;
    this.place.replaceChildren(canvas);
    const chart = createTimeline(canvas, { onFollow: (isFollowing) => { if (!isFollowing) onStop(); }, onDraw });
    chart.onCursor((us) => { if (us !== null) onCursor(us); });
    return chart;
  }

  /** Forget all items. */
  restart() {
    this.chart.destroy();
    this.chart = this.build();
    this.close = null;
  }

  destroy() {
    this.chart.destroy();
  }

  /** @returns {readonly [number, number]} */
  get view() {
    const { t0, t1 } = this.chart.range;
    return [t0, t1];
  }

  /** @param {number | null} us */
  setCursor(us) {
    this.chart.setCursor(us);
  }

  /**
   * @param {number} t0
   * @param {number} t1
   */
  setView(t0, t1) {
    this.chart.setView(t0, t1);
  }

  /** @param {boolean} on */
  follow(on) {
    this.chart.follow(on);
  }

  /** @param {readonly Items[] | null} items of each track */
  setClose(items) {
    if (this.close === items) return;
    this.close = items;
    this.chart.setClose(items);
  }

  /**
   * Take what is new in the model, with the spans that have ended since.
   * @param {RunModel} model
   * @param {readonly Items[]} ended of each track
   * @param {readonly OpenSpan[]} open
   */
  take(model, ended, open) {
    const { chart } = this;
    chart.setUnits(model.units);
    chart.setHolds(model.holds);
    chart.setTracks(model.tracks);
    ended.forEach((items, track) => { chart.append(track, items); });
    if (model.now) chart.setRange(model.begin, model.end);
    model.openItems(open).forEach((items, track) => { chart.setOpen(track, items); });
    this.drawNote(model.clocks.timeline);
  }

  /** @param {string} clock */
  drawNote(clock) {
    const text = dotted([clock, HOW]);
    write(this.note, text);
    this.note.title = text;
  }
}
