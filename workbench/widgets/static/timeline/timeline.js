// The timeline on a canvas: what each rank did when, with any number of rectangles, at the frame rate of the screen.
//
// Times are microseconds from the run's start, float64, without the time in which ranks were held or idle: *holds* say
// where that was and how long, `[[at, length], ...]`. Tracks with few items in view are drawn as rectangles, with the
// names of their units inside and arrows from issue to wait; on the others each pixel has the mean colour of its items:
// see colour_sums.js. The *kept* items cover the whole run. The *close* items, if any, cover a part of it in more
// detail and are drawn instead.

import { Axis, cursorTime } from "../axis.js";
import { KINDS } from "../events.js";
import { formatDuration } from "../format.js";
import { FrameLoop } from "../frame_loop.js";
import { sure } from "../sure.js";
import { holdAt, itemAt, nextEdge } from "./find_item.js";
import { TimelineInput } from "./input.js";
import { describe, legendLines, legendText, tipLines } from "./item_words.js";
import { Painter } from "./painter.js";
import { AXIS_HEIGHT, OTHER, legendEntryAt, placeLegend, placeRows } from "./row_layout.js";
import { Tooltip } from "./tooltip.js";
import { Tracks } from "./tracks.js";
import { ViewRange } from "./view_range.js";

/** @import { FoundItem, Hold } from "./find_item.js" */
/** @import { Items } from "./items.js" */
/** @import { LegendEntry, RowLayout } from "./row_layout.js" */
/** @import { TrackName } from "./track.js" */

const MAX_ITEMS = 3e5; // kept, all tracks together; beyond it the earlier half is dropped
const LEAST_WIDTH = 200; // pixels

/**
 * @typedef {object} Options
 * @property {(isFollowing: boolean) => void} [onFollow]
 * @property {() => void} [onDraw] called when the next frame will draw it, for what is drawn along the same axis
 * @property {number} [maxItems] that are kept
 */

/** @typedef {RowLayout & { legend: readonly LegendEntry[], width: number, height: number }} Layout */

/**
 * Draw a timeline on `canvas`, which gets the width of its parent and the height it needs.
 * @param {HTMLCanvasElement} canvas
 * @param {Options} options
 */
export function createTimeline(canvas, options = {}) {
  return new Timeline(canvas, options);
}

export class Timeline {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Options} options
   */
  constructor(canvas, options) {
    const { parentElement } = canvas;
    if (!parentElement) throw new Error("a timeline's canvas needs a parent element");
    this.canvas = canvas;
    this.options = options;
    this.parent = parentElement;
    dress(canvas, parentElement);
    this.kept = new Tracks();
    /** @type {Tracks | null} */
    this.close = null;
    /** @type {(Items | null)[]} */
    this.open = []; // of each track, items that have not ended
    /** @type {readonly Hold[]} */
    this.holds = [];
    /** @type {readonly string[]} */
    this.units = [];
    /** @type {Set<number>} */
    this.kinds = new Set();
    /** @type {Set<number>} */
    this.others = new Set(); // kinds on the track of other collectives
    this.range = new ViewRange();
    /** @type {Layout} */
    this.layout = { rows: [], legend: [], left: 0, bottom: 0, width: 0, height: 0 };
    /** @type {number | null} */
    this.cursor = null;
    this.announcedEnd = NaN; // of the record, to screen readers
    this.selected = 0; // row
    /** @type {FoundItem | null} */
    this.hovered = null;
    /** @type {((us: number | null) => void)[]} */
    this.cursorCalls = [];
    this.painter = new Painter(canvas);
    this.tooltip = new Tooltip(canvas, parentElement);
    this.frames = new FrameLoop(() => this.picture());
    this.ender = new AbortController();
    this.input = new TimelineInput(this, canvas);
    this.announceCursor();
    this.listen();
    this.resize();
  }

  // -- public

  stats() {
    const { cursor, hovered, range, axis, layout: { rows }, shown: tracks, frames: { count: frames, drawMs, firstPaintMs } } = this;
    /** @type {[number, number]} */
    const view = [range.t0, range.t1];
    return { rectangles: tracks.count, rows: rows.length, frames, drawMs, firstPaintMs, view, cursor,
      isFollowing: range.isFollowing, isDark: this.painter.isDark, hovered: hovered && this.describe(hovered),
      range: [range.low, range.high], plot: { left: axis.left, top: AXIS_HEIGHT, width: axis.width },
      counts: tracks.all.map(({ length }) => length), isClose: this.close !== null,
      holds: this.holds.map(([at, length]) => ({ at, length, x: axis.x(at) })),
      places: rows.map(({ track, name, y, height }) => ({ name, label: track.label, y, height })) };
  }

  /** @param {readonly TrackName[]} tracks all tracks, the earlier ones first */
  setTracks(tracks) {
    this.kept.add(tracks.slice(this.kept.all.length));
    while (this.open.length < tracks.length) this.open.push(null);
    this.layOut();
  }

  /**
   * Add items that have ended to a track.
   * @param {number} index
   * @param {Items} items
   */
  append(index, items) {
    this.kept.append(index, items);
    this.meet(index, items.kind);
    this.range.include(items);
    if (this.kept.count > (this.options.maxItems ?? MAX_ITEMS)) {
      this.kept.forget();
      this.leave();
    }
    this.layOut();
  }

  /**
   * Show items that have not ended, instead of those given before.
   * @param {number} index
   * @param {Items} items
   */
  setOpen(index, items) {
    this.open[index] = items.start.length ? items : null;
    this.meet(index, items.kind);
    this.range.include(items);
    this.layOut();
  }

  /**
   * Draw these items of each track instead of the kept ones; null: draw the kept ones.
   * @param {readonly Items[] | null} items
   */
  setClose(items) {
    if (!items && !this.close) return;
    this.close = items && new Tracks(this.kept.all);
    items?.forEach((found, index) => {
      this.close?.append(index, found);
      this.meet(index, found.kind);
    });
    this.leave();
    this.layOut();
  }

  /** @param {readonly string[]} units names by number */
  setUnits(units) {
    this.units = units;
    this.draw();
  }

  /**
   * Set the range of the record, of which the items may cover a part.
   * @param {number} low
   * @param {number} high
   */
  setRange(low, high) {
    if (this.range.setRecord(low, high)) this.draw();
  }

  /**
   * @param {number} t0
   * @param {number} t1
   */
  setView(t0, t1) {
    this.range.show(t0, t1);
    this.draw();
  }

  fit() {
    this.range.fit();
    this.draw();
  }

  /** @param {boolean} on */
  follow(on) {
    this.range.follow(on);
    this.draw();
  }

  /** @param {readonly Hold[]} holds */
  setHolds(holds) {
    this.holds = holds;
    this.draw();
  }

  /** @param {number | null} us */
  setCursor(us) {
    this.cursor = us;
    this.draw();
  }

  /** @param {(us: number | null) => void} call */
  onCursor(call) {
    this.cursorCalls.push(call);
  }

  destroy() {
    this.ender.abort();
    this.frames.end();
    this.tooltip.remove();
    this.kept = new Tracks();
    this.close = null;
    this.layout = { ...this.layout, rows: [] };
    this.cursorCalls = [];
  }

  // -- what the mouse and the keyboard do

  stopFollowing() {
    if (!this.range.isFollowing) return;
    this.range.isFollowing = false;
    this.options.onFollow?.(false);
  }

  /**
   * Zoom around `t`; returns whether the view changed.
   * @param {number} factor
   * @param {number} t
   */
  zoom(factor, t) {
    const isChanged = this.range.zoom(factor, t);
    this.draw();
    return isChanged;
  }

  /** @param {number} us */
  pan(us) {
    this.stopFollowing();
    this.setView(this.range.t0 + us, this.range.t1 + us);
  }

  /**
   * @param {number | null} us
   * @param {{ isVisible?: boolean }} how `isVisible`: bring it into view
   */
  putCursor(us, { isVisible = false } = {}) {
    const { range } = this;
    this.stopFollowing();
    this.cursor = us;
    if (us !== null && isVisible && !range.isWellInView(us)) range.show(us - range.span / 2, us + range.span / 2);
    this.announceCursor();
    this.cursorCalls.forEach((call) => { call(us); });
    this.draw();
  }

  /**
   * Move the cursor to the nearest begin or end on the selected rank after (or before) it.
   * @param {1 | -1} direction
   */
  step(direction) {
    const t = this.cursor ?? (direction > 0 ? this.range.t0 : this.range.t1);
    const found = nextEdge(this.rowsOfRank().map(({ track }) => track), t, direction);
    if (found !== null) this.putCursor(found, { isVisible: true });
  }

  /** @param {number} by rows */
  select(by) {
    this.selected = Math.min(Math.max(this.selected + by, 0), Math.max(this.layout.rows.length - 1, 0));
    this.announceCursor();
    this.draw();
  }

  /**
   * @param {number} x
   * @param {number} y
   */
  hover(x, y) {
    const { axis, tooltip } = this, entry = legendEntryAt(this.layout.legend, x, y);
    const hold = entry ? null : holdAt(this.holds, axis, x);
    const found = hold ? null : itemAt({ rows: this.layout.rows, axis, open: this.open }, x, y);
    if (found) tooltip.show(tipLines(this.describe(found)), x, y);
    else if (hold) tooltip.show([`ranks held or idle for ${formatDuration(hold[1])}: cut out`], x, y);
    else if (entry) tooltip.show(legendLines(entry.kind), x, y);
    else tooltip.hide();
    this.setHovered(found);
  }

  /** The pointer is over no item. */
  leave() {
    this.tooltip.hide();
    this.setHovered(null);
  }

  /** @param {FoundItem | null} found */
  setHovered(found) {
    const before = this.hovered, isSame = found?.items === before?.items && found?.k === before?.k;
    this.hovered = found;
    if (!isSame) this.draw();
  }

  // -- the page

  listen() {
    const { signal } = this.ender, draw = () => { this.draw(); };
    this.input.listen(signal);
    const size = new ResizeObserver(() => { this.resize(); }), labTheme = new MutationObserver(draw);
    size.observe(this.parent);
    labTheme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw, { signal });
    signal.addEventListener("abort", () => {
      size.disconnect();
      labTheme.disconnect();
    });
  }

  /** Describe the cursor, and what is there on the selected rank, to screen readers. */
  announceCursor() {
    const { canvas, cursor, range } = this, [low, high] = range.isEmpty ? [0, 0] : [range.low, range.high];
    canvas.setAttribute("aria-valuemin", String(Math.round(low)));
    canvas.setAttribute("aria-valuemax", String(Math.round(high)));
    canvas.setAttribute("aria-valuenow", String(Math.round(cursor ?? low)));
    this.announcedEnd = range.high;
    const mine = this.rowsOfRank(), where = cursor === null ? "no cursor" : `${cursorTime(cursor, range.span)} after the start`;
    const there = cursor === null ? [] : mine
      .map((row) => ({ row, items: row.track, k: row.track.at(cursor) }))
      .filter(({ k }) => k >= 0)
      .map((found) => this.describe(found).title);
    canvas.setAttribute("aria-valuetext", [where, mine[0]?.track.label, ...there].filter(Boolean).join(", "));
  }

  resize() {
    this.layout = { ...this.layout, width: Math.max(this.parent.clientWidth, LEAST_WIDTH) };
    this.layOut();
  }

  // -- what is drawn

  /** The tracks that are drawn. */
  get shown() {
    return this.close ?? this.kept;
  }

  /** The plot and the time that it shows. */
  get axis() {
    const { left, width } = this.layout, { t0, t1 } = this.range;
    return new Axis({ left, width: width - left }, [t0, t1]);
  }

  /** The rows of the rank whose row is selected. */
  rowsOfRank() {
    const { rows } = this.layout, rank = rows[this.selected]?.track.rank;
    return rows.filter(({ track }) => track.rank === rank);
  }

  /** @param {FoundItem} found */
  describe(found) {
    return describe(found, this.shown, this.units);
  }

  /**
   * Add kinds to the legend.
   * @param {number} index of their track
   * @param {Uint8Array} kinds
   */
  meet(index, kinds) {
    const found = new Uint8Array(256), isOther = this.kept.all[index]?.name === OTHER; // a set would be asked once per item
    for (const kind of kinds) found[kind] = 1;
    found.forEach((isThere, kind) => {
      if (isThere) this.kinds.add(kind);
      if (isThere && isOther) this.others.add(kind);
    });
  }

  /** Place all rows and the legend, and draw. */
  layOut() {
    const { kept, shown, open, painter, layout: { width } } = this;
    const isUsed = (/** @type {{ length: number }} */ { length }, /** @type {number} */ index) =>
      length > 0 || sure(kept.all[index]).length > 0 || open[index] !== null;
    const [other = NaN, ...more] = this.others, name = more.length ? OTHER : KINDS[other]?.words ?? OTHER;
    const placed = placeRows(shown.all, isUsed, width, name);
    const entries = [...this.kinds].sort((a, b) => a - b).map((kind) => {
      const text = legendText(kind);
      return { kind, text, textWidth: painter.widthInLegend(text) };
    });
    this.layout = { ...placed, ...placeLegend(entries, { ...placed, width }), width };
    this.canvas.style.height = `${this.layout.height}px`;
    this.draw();
  }

  /** Draw in the next frame, once. */
  draw() {
    this.frames.request();
    this.options.onDraw?.();
  }

  /** Draw now; returns whether there were rows. */
  picture() {
    const { painter, range, axis, shown: tracks, open, units, holds, cursor, hovered } = this;
    const { rows, legend, width, bottom, height } = this.layout;
    if (this.announcedEnd !== range.high) this.announceCursor();
    painter.begin(width, height);
    this.tooltip.dress(painter.skin);
    const selected = document.activeElement === this.canvas ? this.selected : -1;
    if (rows.length) painter.draw({ rows, legend, axis, width, bottom, height, tracks, open, units, holds, cursor, selected, hovered });
    else painter.drawSentence("No step is recorded yet.", width, height);
    return rows.length > 0;
  }
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {HTMLElement} parent
 */
function dress(canvas, parent) {
  if (getComputedStyle(parent).position === "static") parent.style.position = "relative";
  Object.assign(canvas.style, { display: "block", width: "100%", touchAction: "pan-y", cursor: "default",
    outline: "none", borderRadius: "4px", userSelect: "none" });
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "slider");
  canvas.setAttribute("aria-roledescription", "timeline");
  canvas.setAttribute("aria-orientation", "horizontal");
  if (canvas.hasAttribute("aria-label")) return;
  canvas.setAttribute("aria-label", "Timeline of the ranks. Arrow keys: from event to event, and up and down " +
    "between rows. Plus and minus: zoom. 0: everything.");
}
