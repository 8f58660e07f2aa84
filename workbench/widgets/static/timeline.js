// The timeline on a canvas: what each rank did when, with any number of rectangles, at the frame rate of the screen.
//
// Times are microseconds from the run's start, float64, without the time in which ranks were held or idle: *holds* say
// where that was and how long, `[[at, length], ...]`. Tracks with few items in view are drawn as rectangles, with the
// names of their units inside and arrows from issue to wait; on the others each pixel has the mean colour of its items:
// see track.js. The *kept* items cover the whole run. The *close* items, if any, cover a part of it in more detail and
// are drawn instead.

import { keepBareKeys } from "./dom.js";
import { KIND, KINDS } from "./events.js";
import { formatBytes, formatDuration, shorten, timeUnit } from "./format.js";
import { FONT, Look, isDark, penOf } from "./look.js";
import { sure } from "./sure.js";
import { MAX_STRADDLING, Tracks, paint, share } from "./track.js";

/** @import { Items, Track, TrackName } from "./track.js" */

const MAX_ITEMS = 3e5; // kept, all tracks together; beyond it the earlier half is dropped
const MAX_RECTANGLES = 4000; // drawn one by one in a frame, all tracks together
const MAX_ARROWS = 48; // in a frame
const MIN_SPAN = 0.5; // microseconds in view
const DRAG = 4; // pixels from which a click is a drag
const AXIS = 30; // height of the axis, in pixels
const HOLD_REACH = 4; // pixels around the line of a hold
const GAP = 9; // between two ranks
const ROWS = /** @type {const} */ ([14, 22]); // height of a row
const TRACKS_HEIGHT = 640; // of all rows together, before they get lower
const LIGHT = {
  ink: "#2f3437", soft: "#5f6b73", grid: "rgba(60,70,80,0.13)", row: "rgba(60,70,80,0.055)", accent: "#0b63ce",
  onAccent: "#ffffff", tip: "#ffffff", tipEdge: "rgba(0,0,0,0.18)", selected: "rgba(11,99,206,0.08)",
};
const DARK = {
  ink: "#e4e7ea", soft: "#a3adb6", grid: "rgba(200,210,220,0.14)", row: "rgba(200,210,220,0.07)", accent: "#8ab8ff",
  onAccent: "#10151b", tip: "#252a30", tipEdge: "rgba(255,255,255,0.22)", selected: "rgba(138,184,255,0.12)",
};

/** @typedef {{ onFollow?: (isFollowing: boolean) => void, maxItems?: number }} Options `maxItems` that are kept */

/** @typedef {{ index: number, track: Track, y: number, height: number }} Row */

/** @typedef {{ row: Row, items: Items, k: number }} Found an item of a row, ended or open */

/** @typedef {{ x: number, y: number, t0: number, t1: number, isMoved: boolean, isScrub: boolean }} Drag */

/** @typedef {{ kind: number, text: string, x: number, y: number }} LegendEntry */

/** @typedef {ReturnType<Timeline["describe"]>} Described */

/**
 * Draw a timeline on `canvas`, which gets the width of its parent and the height it needs.
 * @param {HTMLCanvasElement} canvas
 * @param {Options} options
 */
export function createTimeline(canvas, options = {}) {
  return new Timeline(canvas, options);
}

class Timeline {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Options} options
   */
  constructor(canvas, options) {
    this.canvas = canvas;
    this.options = options;
    this.pen = penOf(canvas);
    const { parentElement } = canvas;
    if (!parentElement) throw new Error("a timeline's canvas needs a parent element");
    this.parent = parentElement;
    this.kept = new Tracks();
    /** @type {Tracks | null} */
    this.close = null;
    /** @type {(Items | null)[]} */
    this.open = []; // of each track, items that have not ended
    /** @type {readonly (readonly [number, number])[]} */
    this.holds = [];
    /** @type {readonly string[]} */
    this.units = [];
    /** @type {Set<number>} */
    this.kinds = new Set();
    /** @type {Row[]} */
    this.rows = [];
    /** @type {LegendEntry[]} */
    this.legend = [];
    this.t0 = 0;
    this.t1 = 1;
    this.low = Infinity;
    this.high = -Infinity;
    this.isTouched = false;
    this.isFollowing = false;
    /** @type {number | null} */
    this.cursor = null;
    this.selected = 0;
    /** @type {Found | null} */
    this.hovered = null;
    this.wasHovered = false;
    /** @type {Drag | null} */
    this.drag = null;
    this.waiting = 0; // for the next frame
    this.frames = 0;
    this.drawMs = 0;
    this.born = performance.now();
    /** @type {number | null} */
    this.firstPaintMs = null;
    this.saidHigh = NaN;
    this.left = this.width = this.bottom = this.height = 0;
    this.ratio = 1;
    this.isDark = false;
    this.skin = LIGHT;
    /** @type {((us: number | null) => void)[]} */
    this.cursorCalls = [];
    /** @type {((found: Described | null) => void)[]} */
    this.hoverCalls = [];
    this.look = new Look();
    this.image = document.createElement("canvas");
    this.data = new ImageData(1, 1);
    this.pixels = new Uint32Array(this.data.data.buffer);
    this.ender = new AbortController();
    this.tip = document.createElement("div");
    this.observer = new ResizeObserver(() => { this.resize(); });
    this.labTheme = new MutationObserver(() => { this.draw(); });
    this.dress();
    this.listen();
    this.resize();
  }

  // -- public

  stats() {
    const { t0, t1, cursor, frames, drawMs, firstPaintMs, isFollowing, hovered } = this;
    const tracks = this.shown.all;
    /** @type {[number, number]} */
    const view = [t0, t1];
    return { rectangles: this.shown.count, rows: this.rows.length, frames, drawMs, firstPaintMs, view, cursor,
      isFollowing, isDark: this.isDark, hovered: hovered && this.describe(hovered), range: [this.low, this.high],
      plot: { left: this.left, top: AXIS, width: this.width - this.left }, counts: tracks.map(({ length }) => length),
      isClose: this.close !== null, holds: this.holds.map(([at, length]) => ({ at, length, x: this.x(at) })),
      places: this.rows.map(({ track, y, height }) => ({ name: track.name, label: track.label, y, height })) };
  }

  /** @param {readonly TrackName[]} tracks all tracks, the earlier ones first */
  setTracks(tracks) {
    this.kept.add(tracks.slice(this.kept.all.length));
    while (this.open.length < tracks.length) this.open.push(null);
    this.layOut();
    this.draw();
  }

  /**
   * Add items that have ended to a track.
   * @param {number} index
   * @param {Items} items
   */
  append(index, items) {
    this.kept.append(index, items);
    this.meet(items.kind);
    this.reach(items);
    if (this.kept.count > (this.options.maxItems ?? MAX_ITEMS)) {
      this.kept.forget();
      this.leave();
    }
    this.layOut();
    this.draw();
  }

  /**
   * Show items that have not ended, instead of those given before.
   * @param {number} index
   * @param {Items} items
   */
  setOpen(index, items) {
    this.open[index] = items.start.length ? items : null;
    this.meet(items.kind);
    this.reach(items);
    this.layOut();
    this.draw();
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
      this.meet(found.kind);
    });
    this.leave();
    this.layOut();
    this.draw();
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
    if (this.low === low && this.high >= high) return;
    this.low = low;
    this.high = Math.max(high, this.high);
    this.settle();
    this.draw();
  }

  /**
   * @param {number} t0
   * @param {number} t1
   */
  setView(t0, t1) {
    this.isTouched = true;
    this.view(t0, t1);
    this.draw();
  }

  fit() {
    this.isTouched = false;
    this.whole();
    this.draw();
  }

  /** @param {boolean} on */
  follow(on) {
    this.isFollowing = on;
    if (on && this.high >= this.low) this.showLatest();
    this.draw();
  }

  /** @param {readonly (readonly [number, number])[]} holds */
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

  /** @param {(found: Described | null) => void} call */
  onHover(call) {
    this.hoverCalls.push(call);
  }

  destroy() {
    this.ender.abort();
    this.observer.disconnect();
    this.labTheme.disconnect();
    cancelAnimationFrame(this.waiting);
    this.waiting = -1;
    this.tip.remove();
    this.kept = new Tracks();
    this.close = null;
    this.rows = [];
    this.cursorCalls = [];
    this.hoverCalls = [];
  }

  // -- data

  /** The tracks that are drawn. */
  get shown() {
    return this.close ?? this.kept;
  }

  /**
   * Add kinds to the legend.
   * @param {Uint8Array} kinds
   */
  meet(kinds) {
    const found = new Uint8Array(256);
    for (const kind of kinds) found[kind] = 1;
    found.forEach((isThere, kind) => isThere && this.kinds.add(kind));
  }

  /** @param {Items} items */
  reach({ start, end }) {
    for (const t of start) this.low = Math.min(this.low, t);
    for (const t of end) this.high = Math.max(this.high, t);
    this.settle();
  }

  // -- what is in view

  /** Adapt the view to a changed range. */
  settle() {
    if (this.isFollowing) this.showLatest();
    else if (!this.isTouched) this.whole();
  }

  /**
   * @param {number} t0
   * @param {number} t1
   */
  view(t0, t1) {
    const range = Math.max(this.high - this.low, MIN_SPAN) || 1, margin = 0.02 * range;
    if (!Number.isFinite(range)) [this.t0, this.t1] = [t0, t1];
    else {
      const span = Math.min(Math.max(t1 - t0, MIN_SPAN), range + 2 * margin);
      const middle = (t0 + t1) / 2;
      const from = Math.min(Math.max(middle - span / 2, this.low - margin - span / 2), this.high + margin - span / 2);
      this.t0 = span >= range + 2 * margin ? this.low - margin : from;
      this.t1 = this.t0 + span;
    }
  }

  whole() {
    if (!(this.high >= this.low)) return;
    const margin = 0.02 * Math.max(this.high - this.low, MIN_SPAN);
    this.t0 = this.low - margin;
    this.t1 = this.high + margin;
  }

  showLatest() {
    const span = this.isTouched ? this.t1 - this.t0 : Infinity;
    if (span >= this.high - this.low) this.whole();
    else {
      this.t1 = this.high + 0.02 * span;
      this.t0 = this.t1 - span;
    }
  }

  hold() {
    if (!this.isFollowing) return;
    this.isFollowing = false;
    this.options.onFollow?.(false);
  }

  /**
   * Zoom around `t`; returns whether the view changed.
   * @param {number} factor
   * @param {number} t
   */
  zoom(factor, t) {
    const before = this.t1 - this.t0;
    const span = Math.max(before * factor, MIN_SPAN), part = (t - this.t0) / before;
    this.setView(t - part * span, t + (1 - part) * span);
    return this.t1 - this.t0 !== before;
  }

  /** @param {number} us */
  pan(us) {
    this.hold();
    this.setView(this.t0 + us, this.t1 + us);
  }

  /** @param {number} t */
  x(t) {
    return this.left + ((t - this.t0) / (this.t1 - this.t0)) * (this.width - this.left);
  }

  /** @param {number} x */
  t(x) {
    return this.t0 + ((x - this.left) / (this.width - this.left)) * (this.t1 - this.t0);
  }

  // -- the cursor

  /**
   * @param {number | null} us
   * @param {{ isVisible?: boolean }} how `isVisible`: bring it into view
   */
  putCursor(us, { isVisible = false } = {}) {
    this.hold();
    this.cursor = us;
    const span = this.t1 - this.t0;
    if (us !== null && isVisible && (us < this.t0 + 0.02 * span || us > this.t1 - 0.02 * span)) {
      this.setView(us - span / 2, us + span / 2);
    }
    this.sayCursor();
    this.cursorCalls.forEach((call) => { call(us); });
    this.draw();
  }

  /**
   * Move the cursor to the nearest begin or end on the selected rank after (or before) it.
   * @param {1 | -1} direction
   */
  step(direction) {
    const t = this.cursor ?? (direction > 0 ? this.t0 : this.t1);
    const rank = this.selectedTrack()?.rank;
    let best = direction * Infinity;
    for (const { track } of this.rows.filter((row) => row.track.rank === rank)) {
      for (const k of track.near(t)) {
        for (const edge of [sure(track.start[k]), sure(track.end[k])]) {
          if ((edge - t) * direction > 0 && (edge - best) * direction < 0) best = edge;
        }
      }
    }
    if (Number.isFinite(best)) this.putCursor(best, { isVisible: true });
  }

  /** The track of the selected row, if there are rows. */
  selectedTrack() {
    return this.rows.at(this.selected)?.track;
  }

  sayCursor() {
    const { canvas, cursor } = this;
    const low = Number.isFinite(this.low) ? this.low : 0, high = Number.isFinite(this.high) ? this.high : 0;
    canvas.setAttribute("aria-valuemin", String(Math.round(low)));
    canvas.setAttribute("aria-valuemax", String(Math.round(high)));
    this.saidHigh = this.high;
    canvas.setAttribute("aria-valuenow", String(Math.round(cursor ?? low)));
    const rank = this.selectedTrack();
    const there = cursor === null || !rank ? [] : this.rows
      .filter(({ track }) => track.rank === rank.rank)
      .map((row) => ({ row, items: row.track, k: row.track.at(cursor) }))
      .filter(({ k }) => k >= 0)
      .map((found) => this.describe(found).title);
    const where = cursor === null ? "no cursor" : `${cursorTime(cursor, this.t1 - this.t0)} after the start`;
    canvas.setAttribute("aria-valuetext", [where, rank?.label, ...there].filter(Boolean).join(", "));
  }

  // -- hovering

  /** @param {number} y */
  rowAt(y) {
    return this.rows.findIndex((row) => y >= row.y - 1 && y < row.y + row.height + 1);
  }

  /**
   * The item at a point, or near it.
   * @param {number} x
   * @param {number} y
   * @returns {Found | null}
   */
  hit(x, y) {
    const row = this.rows.at(this.rowAt(y));
    if (this.rowAt(y) < 0 || !row || x < this.left) return null;
    const t = this.t(x), slack = (3 * (this.t1 - this.t0)) / (this.width - this.left);
    const { track } = row, half = y - row.y < row.height / 2 ? 1 : 2;
    const [first, last] = track.within(t - slack, t + slack);
    /** @type {Found | null} */
    let best = null;
    let distance = Infinity;
    for (let k = Math.max(first, last - 4 * MAX_STRADDLING); k < last; k++) {
      const away = Math.max(sure(track.start[k]) - t, t - sure(track.end[k]), 0) + (track.lane[k] === 3 - half ? slack : 0);
      if (away <= distance && away <= slack) [best, distance] = [{ row, items: track, k }, away];
    }
    const open = this.open[row.index];
    open?.start.forEach((start, k) => {
      if (start - slack <= t && t <= sure(open.end[k]) + slack) best = { row, items: open, k };
    });
    return best;
  }

  /**
   * An item in words and numbers.
   * @param {Found} found
   */
  describe({ row: { track }, items, k }) {
    const kind = sure(items.kind[k]), duration = sure(items.end[k]) - sure(items.start[k]);
    const unit = sure(items.unit[k]) >= 0 ? this.unitName(sure(items.unit[k])) : "";
    const cause = Number.isNaN(items.arrowFrom[k]) ? null : this.shown.issue(track, sure(items.arrowFrom[k]));
    const word = sure(KINDS[kind]).words;
    const what = kind === KIND.WAIT && cause ? `wait for ${sure(KINDS[sure(cause.track.kind[cause.k])]).words}` : word;
    const exposed = duration * share(sure(items.exposed[k]));
    return { kind, word, unit, duration, bytes: items.bytes[k], rank: track.rank, label: track.label,
      start: sure(items.start[k]), end: sure(items.end[k]), exposed, isExposed: sure(items.exposed[k]) > 0, hasEnded: items === track,
      isCommunication: sure(KINDS[kind]).isCollective, title: unit ? `${what} of ${unit}` : what };
  }

  /** @param {number} unit */
  unitName(unit) {
    return this.units.at(unit) ?? `unit ${unit}`;
  }

  /**
   * @param {Found} found
   * @param {number} x
   * @param {number} y
   */
  showTip(found, x, y) {
    const said = this.describe(found);
    const size = said.bytes ? `${formatBytes(said.bytes)} \u00b7 ` : "";
    const lines = [said.title, `${size}${formatDuration(said.duration)}${said.hasEnded ? "" : ", not ended"}`];
    if (said.kind === KIND.WAIT) lines.push("exposed: compute waited");
    else if (said.isCommunication) lines.push(exposure(said));
    lines.push(`${said.label}, from ${formatDuration(said.start)}`);
    this.putTip(lines, x, y);
  }

  /**
   * @param {string[]} lines
   * @param {number} x
   * @param {number} y
   */
  putTip(lines, x, y) {
    const { tip } = this;
    tip.replaceChildren(...lines.map((line, k) => {
      const div = document.createElement("div");
      div.textContent = line;
      if (!k) div.style.fontWeight = "600";
      return div;
    }));
    tip.style.display = "block";
    const box = this.canvas.getBoundingClientRect();
    const left = x + 16 + tip.offsetWidth > box.width ? x - 16 - tip.offsetWidth : x + 16;
    const top = Math.min(y + 14, Math.max(box.height - tip.offsetHeight - 4, 0));
    tip.style.left = `${this.canvas.offsetLeft + Math.max(left, 0)}px`;
    tip.style.top = `${this.canvas.offsetTop + top}px`;
  }

  /**
   * The hold under the pointer: its line is thin, and drawn over the items around it.
   * @param {number} x
   */
  holdAt(x) {
    return this.holds.find(([at]) => Math.abs(this.x(at) - x) <= HOLD_REACH);
  }

  /**
   * @param {number} x
   * @param {number} y
   */
  hover(x, y) {
    const hold = this.holdAt(x), found = hold ? null : this.hit(x, y);
    if (found) this.showTip(found, x, y);
    else if (hold) this.putTip([`ranks held or idle for ${formatDuration(hold[1])}: cut out`], x, y);
    else this.tip.style.display = "none";
    this.point(found);
  }

  leave() {
    this.tip.style.display = "none";
    this.point(null);
  }

  /** @param {Found | null} found */
  point(found) {
    const isSame = found !== null && found.items === this.hovered?.items && found.k === this.hovered.k;
    this.hovered = found;
    if (isSame || (!found && !this.wasHovered)) return;
    this.wasHovered = found !== null;
    this.hoverCalls.forEach((call) => { call(found && this.describe(found)); });
    this.draw();
  }

  // -- the page

  dress() {
    const { canvas, parent } = this;
    if (getComputedStyle(parent).position === "static") parent.style.position = "relative";
    Object.assign(canvas.style, { display: "block", width: "100%", touchAction: "pan-y", cursor: "default",
      outline: "none", borderRadius: "4px", userSelect: "none" });
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "slider");
    canvas.setAttribute("aria-roledescription", "timeline");
    canvas.setAttribute("aria-orientation", "horizontal");
    if (!canvas.hasAttribute("aria-label")) {
      canvas.setAttribute("aria-label", "Timeline of the ranks. Arrow keys: from event to event, and up and down " +
        "between rows. Plus and minus: zoom. 0: everything.");
    }
    this.tip.setAttribute("role", "tooltip");
    Object.assign(this.tip.style, { position: "absolute", display: "none", pointerEvents: "none", zIndex: 10,
      padding: "6px 9px", borderRadius: "5px", font: `12px/1.45 ${FONT}`, maxWidth: "340px", whiteSpace: "nowrap",
      overflow: "hidden", textOverflow: "ellipsis", boxShadow: "0 2px 10px rgba(0,0,0,0.22)" });
    parent.append(this.tip);
    this.sayCursor();
  }

  listen() {
    const { canvas } = this, options = { signal: this.ender.signal };
    keepBareKeys(canvas, options);
    canvas.addEventListener("pointerdown", (event) => { this.pointerDown(event); }, options);
    canvas.addEventListener("pointermove", (event) => { this.pointerMove(event); }, options);
    canvas.addEventListener("pointerup", (event) => { this.pointerUp(event); }, options);
    canvas.addEventListener("pointercancel", () => (this.drag = null), options);
    canvas.addEventListener("pointerleave", () => { this.leave(); }, options);
    canvas.addEventListener("wheel", (event) => { this.wheel(event); }, { ...options, passive: false });
    canvas.addEventListener("dblclick", () => { this.fit(); }, options);
    canvas.addEventListener("keydown", (event) => { this.key(event); }, options);
    canvas.addEventListener("focus", () => { this.ring(); }, options);
    canvas.addEventListener("blur", () => { this.ring(); }, options);
    this.observer.observe(this.parent);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.draw(); }, options);
    this.labTheme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  }

  ring() {
    const isSeen = document.activeElement === this.canvas && this.canvas.matches(":focus-visible");
    this.canvas.style.outline = isSeen ? `2px solid ${this.skin.accent}` : "none";
    this.canvas.style.outlineOffset = "-2px";
  }

  /**
   * @param {MouseEvent} event
   * @returns {[number, number]}
   */
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  /** @param {PointerEvent} event */
  pointerDown(event) {
    if (event.button !== 0) return;
    const [x, y] = this.place(event);
    const nearCursor = this.cursor !== null && Math.abs(this.x(this.cursor) - x) < 4;
    this.drag = { x, y, t0: this.t0, t1: this.t1, isMoved: false, isScrub: y < AXIS || nearCursor };
    this.canvas.setPointerCapture(event.pointerId);
    if (y < AXIS && x >= this.left) this.putCursor(this.t(x));
  }

  /** @param {PointerEvent} event */
  pointerMove(event) {
    const [x, y] = this.place(event);
    const { drag } = this;
    const isScrub = drag?.isMoved ? drag.isScrub : y < AXIS;
    this.canvas.style.cursor = isScrub ? "ew-resize" : drag?.isMoved ? "grabbing" : "default";
    if (!drag) {
      this.hover(x, y);
      return;
    }
    drag.isMoved ||= Math.abs(x - drag.x) > DRAG;
    if (!drag.isMoved) return;
    this.leave();
    if (drag.isScrub) this.putCursor(Math.min(Math.max(this.t(x), this.low), this.high));
    else this.pan(drag.t0 + ((drag.x - x) / (this.width - this.left)) * (drag.t1 - drag.t0) - this.t0);
  }

  /** @param {PointerEvent} event */
  pointerUp(event) {
    const { drag } = this;
    this.drag = null;
    this.canvas.style.cursor = "default";
    if (!drag || drag.isMoved) return;
    const [x, y] = this.place(event), row = this.rowAt(y);
    if (row >= 0) this.selected = row;
    if (x >= this.left && y >= AXIS) this.putCursor(this.t(x));
    else this.draw();
  }

  /** @param {WheelEvent} event */
  wheel(event) {
    const [x] = this.place(event);
    const isPan = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const pixels = (isPan ? event.deltaX || event.deltaY : event.deltaY) * (event.deltaMode === 1 ? 24 : 1);
    if (isPan) {
      event.preventDefault();
      this.pan((pixels / (this.width - this.left)) * (this.t1 - this.t0));
      return;
    }
    const factor = Math.exp(Math.max(Math.min(pixels, 240), -240) * (event.ctrlKey ? 0.01 : 0.0025));
    this.hold();
    if (this.zoom(factor, this.t(Math.max(x, this.left)))) event.preventDefault(); // else the page scrolls
    this.leave();
  }

  /** @param {number} by */
  select(by) {
    this.selected = Math.min(Math.max(this.selected + by, 0), Math.max(this.rows.length - 1, 0));
    this.sayCursor();
    this.draw();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { cursor, t0, t1 } = this, span = t1 - t0;
    const zoom = (/** @type {number} */ factor) =>
      this.zoom(factor, cursor !== null && cursor >= t0 && cursor <= t1 ? cursor : (t0 + t1) / 2);
    const go = (/** @type {number} */ t) => {
      if (this.high >= this.low) this.putCursor(t, { isVisible: true });
    };
    const shift = (/** @type {1 | -1} */ way) => {
      if (event.shiftKey) this.pan((way * span) / 8);
      else this.step(way);
    };
    /** @type {Map<string, () => unknown>} */
    const actions = new Map([
      ["ArrowRight", () => { shift(1); }],
      ["ArrowLeft", () => { shift(-1); }],
      ["ArrowDown", () => { this.select(1); }],
      ["ArrowUp", () => { this.select(-1); }],
      ...["+", "="].map((key) => /** @type {const} */ ([key, () => zoom(0.6)])),
      ...["-", "_"].map((key) => /** @type {const} */ ([key, () => zoom(1 / 0.6)])),
      ["Home", () => { go(this.low); }],
      ["End", () => { go(this.high); }],
      ["PageUp", () => { this.pan(-0.9 * span); }],
      ["PageDown", () => { this.pan(0.9 * span); }],
      ["0", () => { this.fit(); }],
      ["Escape", () => {
        this.leave();
        if (cursor !== null) this.putCursor(null);
      }],
    ]);
    const action = actions.get(event.key);
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
    this.ring();
  }

  resize() {
    this.width = Math.max(this.parent.clientWidth, 200);
    this.layOut();
    this.draw();
  }

  /** Place all rows, by rank; tracks that are empty on all ranks are left out. */
  layOut() {
    const { kept: { all: kept }, shown: { all: tracks }, open } = this;
    const isUsed = (/** @type {Track} */ track, /** @type {number} */ index) =>
      track.length > 0 || sure(kept[index]).length > 0 || open[index] !== null;
    const used = new Set(tracks.filter(isUsed).map((track) => track.name));
    const seen = tracks.map((track, index) => ({ track, index })).filter(({ track }) => used.has(track.name));
    const height = Math.round(Math.min(Math.max(TRACKS_HEIGHT / Math.max(seen.length, 1), ROWS[0]), ROWS[1]));
    this.left = this.width < 560 ? 104 : 168;
    this.rows = [];
    let y = AXIS + 4;
    for (const rank of new Set(seen.map(({ track }) => track.rank))) {
      for (const { track, index } of seen.filter((entry) => entry.track.rank === rank)) {
        this.rows.push({ track, index, y, height: height - 2 });
        y += height;
      }
      y += GAP;
    }
    this.bottom = Math.max(y - GAP, AXIS + 60);
    this.layOutLegend();
    this.canvas.style.height = `${this.height}px`;
  }

  /** Place the legend's entries, wrapped into lines. */
  layOutLegend() {
    this.pen.font = `12px ${FONT}`;
    const entries = [...this.kinds].sort((a, b) => a - b).map((kind) => {
      const word = sure(KINDS[kind]).words;
      const text = kind === KIND.WAIT ? `${word} (exposed)` : word;
      return { kind, text, width: 18 + this.pen.measureText(text).width + 14 };
    });
    const whole = entries.reduce((sum, { width }) => sum + width, 0);
    const left = Math.max(Math.min(this.left, this.width - whole), 4); // further left if all then fit into one line
    let x = left, y = this.bottom + 12;
    this.legend = entries.map(({ kind, text, width }) => {
      if (x + width > this.width + 14 && x > left) [x, y] = [left, y + 20];
      const entry = { kind, text, x, y };
      x += width;
      return entry;
    });
    this.height = y + 26;
  }

  // -- drawing

  /** Draw in the next frame, once. */
  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      const begin = performance.now();
      this.picture();
      this.drawMs = performance.now() - begin;
      this.frames += 1;
      if (this.firstPaintMs === null && this.rows.length) this.firstPaintMs = performance.now() - this.born;
    });
  }

  picture() {
    const { canvas, pen } = this, ratio = window.devicePixelRatio || 1;
    if (this.legend.length !== this.kinds.size) this.layOut();
    if (this.saidHigh !== this.high) this.sayCursor();
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    this.ratio = ratio;
    this.isDark = isDark();
    this.skin = this.isDark ? DARK : LIGHT;
    Object.assign(this.tip.style, { background: this.skin.tip, color: this.skin.ink,
      border: `1px solid ${this.skin.tipEdge}` });
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    if (!this.rows.length) {
      this.say("No step is recorded yet.");
      return;
    }
    this.drawRows();
    this.drawAxis();
    this.clipped(() => {
      this.drawArrows(this.drawItems());
      this.drawHovered();
    });
    this.drawHolds();
    this.drawCursor();
    this.drawLabels();
    this.drawLegend();
  }

  /** @param {string} sentence */
  say(sentence) {
    const { pen } = this;
    pen.font = `14px ${FONT}`;
    Object.assign(pen, { fillStyle: this.skin.soft, textAlign: "center", textBaseline: "middle" });
    pen.fillText(sentence, this.width / 2, this.height / 2);
  }

  /** @param {() => void} action */
  clipped(action) {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(this.left, AXIS, this.width - this.left, this.bottom - AXIS);
    pen.clip();
    action();
    pen.restore();
  }

  drawRows() {
    const { pen } = this;
    this.rows.forEach(({ y, height }, k) => {
      pen.fillStyle = this.skin.row;
      pen.fillRect(this.left, y, this.width - this.left, height);
      if (k !== this.selected || document.activeElement !== this.canvas) return;
      pen.fillStyle = this.skin.selected;
      pen.fillRect(0, y, this.width, height);
    });
  }

  drawAxis() {
    const { pen } = this, span = this.t1 - this.t0;
    const step = niceStep((span / (this.width - this.left)) * 110);
    const [divisor, unit] = timeUnit(Math.max(Math.abs(this.t1), step));
    const digits = Math.max(0, -Math.floor(Math.log10(step / divisor) + 1e-9));
    const flag = this.flag() ?? { left: Infinity, width: 0 };
    pen.font = `11px ${FONT}`;
    const clear = Math.max(this.left - 8, pen.measureText(this.inView()).width + 12);
    Object.assign(pen, { textAlign: "center", textBaseline: "middle" });
    for (let t = Math.ceil(this.t0 / step) * step; t <= this.t1; t += step) {
      const x = Math.round(this.x(t)) + 0.5 / this.ratio;
      pen.fillStyle = this.skin.grid;
      pen.fillRect(x, AXIS - 4, 1, this.bottom - AXIS + 4);
      pen.fillStyle = this.skin.soft;
      const text = `${(t / divisor).toFixed(Math.min(digits, 9))} ${unit}`.replace(/^-(0(\.0*)?) /, "$1 ");
      const half = pen.measureText(text).width / 2;
      const isFree = x + half + 4 < flag.left || x - half - 4 > flag.left + flag.width;
      if (isFree && x - half >= clear && x + half <= this.width) pen.fillText(text, x, 14);
    }
  }

  /** Draw all items; returns the rows whose items were drawn one by one, and their ranges. */
  drawItems() {
    const most = Math.max(MAX_RECTANGLES / this.rows.length, 40);
    const rows = this.rows.map((row) => {
      const [first, last] = row.track.within(this.t0, this.t1);
      return { row, first, last };
    });
    const few = rows.filter(({ first, last }) => last - first <= most);
    const many = rows.filter(({ first, last }) => last - first > most);
    if (many.length) this.drawMany(many.map(({ row }) => row));
    for (const { row, first, last } of few) {
      for (let k = first; k < last; k++) this.drawItem(row, row.track, k, sure(row.track.lane[k]));
    }
    for (const row of this.rows) {
      const open = this.open[row.index];
      open?.start.forEach((_, k) => { this.drawItem(row, open, k, 0); });
    }
    return few;
  }

  /**
   * Draw tracks of many items: one line of pixels each, stretched.
   * @param {Row[]} rows
   */
  drawMany(rows) {
    const { pen, image, ratio } = this, imagePen = penOf(image);
    const left = Math.round(this.left * ratio), width = this.canvas.width - left;
    if (this.data.width !== width || this.data.height !== rows.length) {
      Object.assign(image, { width, height: rows.length });
      this.data = imagePen.createImageData(width, rows.length);
      this.pixels = new Uint32Array(this.data.data.buffer);
    }
    this.pixels.fill(0);
    const step = (this.t1 - this.t0) / width;
    rows.forEach(({ track }, k) => {
      track.sumUp(this.look);
      paint(track, this.pixels, k * width, width, this.t0, step, this.look);
    });
    imagePen.putImageData(this.data, 0, 0);
    pen.imageSmoothingEnabled = false;
    rows.forEach(({ y, height }, k) => {
      pen.drawImage(image, 0, k, width, 1, this.left, y, this.width - this.left, height);
    });
  }

  /**
   * @param {Row} row
   * @param {Items} items
   * @param {number} k
   * @param {number} lane
   */
  drawItem(row, items, k, lane) {
    const { pen, look, ratio } = this;
    const snap = (/** @type {number} */ x) => Math.round(x * ratio) / ratio;
    const from = snap(Math.max(this.x(sure(items.start[k])), this.left - 2));
    const to = snap(Math.min(this.x(sure(items.end[k])), this.width + 2));
    const gap = to - from > 5 ? 1 : 0; // neighbours stay apart
    const width = Math.max(to - from - gap, 1);
    const height = lane ? (row.height - 1) / 2 : row.height, y = lane === 2 ? row.y + height + 1 : row.y;
    const kind = sure(items.kind[k]);
    pen.fillStyle = look.colour(kind);
    if (items !== row.track) pen.globalAlpha = 0.6;
    pen.fillRect(from, y, width, height);
    pen.globalAlpha = 1;
    const whole = this.x(sure(items.end[k])) - this.x(sure(items.start[k]));
    const exposed = whole * share(sure(items.exposed[k]));
    if (exposed > 0 && kind !== KIND.WAIT) {
      const begin = Math.max(snap(this.x(sure(items.end[k])) - exposed), from);
      pen.fillStyle = look.exposedCss;
      if (begin < from + width) pen.fillRect(begin, y, from + width - begin, height);
    }
    if (width > 34 && height >= 11) this.drawName(kind, sure(items.unit[k]), { x: from, y, width, height });
  }

  /**
   * @param {number} kind
   * @param {number} unit
   * @param {{ x: number, y: number, width: number, height: number }} box
   */
  drawName(kind, unit, { x, y, width, height }) {
    const { pen } = this, isUnit = unit >= 0;
    const name = isUnit ? this.unitName(unit) : sure(KINDS[kind]).words;
    const size = Math.min(11, height - 3);
    const letters = Math.floor((width - 6) / (0.55 * size));
    if (letters < (isUnit ? Math.min(name.length, 9) : name.length)) return; // names of kinds are never cut
    pen.font = `${size}px ${FONT}`;
    Object.assign(pen, { fillStyle: this.look.textOn(kind), textAlign: "left", textBaseline: "middle" });
    pen.fillText(shorten(name, letters), x + 4, y + height / 2 + 0.5);
  }

  /**
   * Draw arrows from a collective's issue to the wait for it, where there is room.
   * @param {{ row: Row, first: number, last: number }[]} few
   */
  drawArrows(few) {
    const found = [];
    for (const { row, first, last } of few) {
      for (let k = first; k < last; k++) {
        const { start, end, arrowFrom } = row.track;
        if (Number.isNaN(arrowFrom[k]) || this.x(sure(end[k])) - this.x(sure(start[k])) < 2) continue;
        found.push({ row, k, length: sure(end[k]) - sure(start[k]) });
      }
    }
    found.sort((a, b) => b.length - a.length);
    for (const { row, k } of found.slice(0, MAX_ARROWS)) this.drawArrow(row, row.track, k, 0.65, 1);
  }

  /**
   * @param {Row} row
   * @param {Items} items
   * @param {number} k
   * @param {number} alpha
   * @param {number} thickness
   */
  drawArrow(row, items, k, alpha, thickness) {
    const cause = this.shown.issue(row.track, sure(items.arrowFrom[k]));
    const origin = cause && this.rows.find(({ track }) => track === cause.track);
    if (!origin) return;
    const { pen } = this;
    const x0 = this.x(sure(items.arrowFrom[k])), x1 = this.x(sure(items.start[k]));
    const down = origin.y < row.y ? 1 : -1;
    const y0 = down > 0 ? origin.y + origin.height : origin.y, y1 = down > 0 ? row.y : row.y + row.height;
    const bend = down * Math.max(8, 0.45 * Math.abs(y1 - y0));
    pen.globalAlpha = alpha;
    Object.assign(pen, { strokeStyle: this.skin.ink, fillStyle: this.skin.ink, lineWidth: thickness });
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1 - 4 * down);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x1, y1 + down);
    pen.lineTo(x1 - 3.2, y1 - 5.5 * down);
    pen.lineTo(x1 + 3.2, y1 - 5.5 * down);
    pen.fill();
    pen.beginPath();
    pen.arc(x0, y0, 2, 0, 2 * Math.PI);
    pen.fill();
    pen.globalAlpha = 1;
  }

  drawHovered() {
    if (!this.hovered) return;
    const { row, items, k } = this.hovered;
    const { pen } = this, lane = items === row.track ? row.track.lane[k] : 0;
    const height = lane ? (row.height - 1) / 2 : row.height, y = lane === 2 ? row.y + height + 1 : row.y;
    const from = Math.max(this.x(sure(items.start[k])), this.left - 4);
    const to = Math.min(this.x(sure(items.end[k])), this.width + 4);
    Object.assign(pen, { strokeStyle: this.skin.ink, lineWidth: 2 });
    pen.strokeRect(from, y, Math.max(to - from, 2), height);
    if (!Number.isNaN(items.arrowFrom[k])) this.drawArrow(row, items, k, 1, 1.6);
  }

  /** The label with the cursor's time, above it; null if it is not in view. */
  flag() {
    if (this.cursor === null || this.cursor < this.t0 || this.cursor > this.t1) return null;
    const { pen } = this, text = cursorTime(this.cursor, this.t1 - this.t0), x = this.x(this.cursor);
    pen.font = `600 11px ${FONT}`;
    const width = pen.measureText(text).width + 12;
    return { text, x, width, left: Math.min(Math.max(x - width / 2, this.left), this.width - width) };
  }

  /** Draw a thin line, with a mark of two bars in the axis, where ranks were held or idle. */
  drawHolds() {
    const { pen } = this;
    pen.fillStyle = this.skin.ink;
    for (const [at] of this.holds) {
      if (at < this.t0 || at > this.t1) continue;
      const x = Math.round(this.x(at));
      for (let y = AXIS; y < this.bottom; y += 5) pen.fillRect(x, y, 1, 3);
      for (const side of [-3, 2]) pen.fillRect(x + side, AXIS - 9, 2, 7);
    }
  }

  drawCursor() {
    const flag = this.flag();
    if (!flag) return;
    const { pen } = this;
    pen.fillStyle = this.skin.accent;
    pen.fillRect(Math.round(flag.x) - 0.75, AXIS - 7, 1.5, this.bottom - AXIS + 7);
    pen.beginPath();
    pen.roundRect(flag.left, 5, flag.width, 18, 4);
    pen.fill();
    Object.assign(pen, { fillStyle: this.skin.onAccent, textAlign: "center", textBaseline: "middle" });
    pen.fillText(flag.text, flag.left + flag.width / 2, 14.5);
  }

  drawLabels() {
    const { pen } = this;
    pen.textBaseline = "middle";
    /** @type {number | null} */
    let before = null;
    for (const { track, y, height } of this.rows) {
      const size = Math.min(12, height);
      pen.font = `${size}px ${FONT}`;
      Object.assign(pen, { textAlign: "right", fillStyle: this.skin.soft });
      pen.fillText(track.name, this.left - 10, y + height / 2 + 0.5);
      if (track.rank !== before) {
        pen.font = `600 ${size}px ${FONT}`;
        Object.assign(pen, { textAlign: "left", fillStyle: this.skin.ink });
        const text = this.left < 120 ? `${track.rank}` : shorten(track.label, 10);
        pen.fillText(text, 4, y + height / 2 + 0.5);
      }
      before = track.rank;
    }
    pen.font = `11px ${FONT}`;
    Object.assign(pen, { textAlign: "left", fillStyle: this.skin.soft });
    pen.fillText(this.inView(), 4, 14);
  }

  /** The text at the left of the axis. */
  inView() {
    return `${formatDuration(this.t1 - this.t0)} in view`;
  }

  drawLegend() {
    const { pen } = this;
    pen.font = `12px ${FONT}`;
    Object.assign(pen, { textAlign: "left", textBaseline: "middle" });
    for (const { kind, text, x, y } of this.legend) {
      pen.fillStyle = this.look.colour(kind);
      pen.beginPath();
      pen.roundRect(x, y + 1, 12, 12, 2);
      pen.fill();
      pen.fillStyle = this.skin.soft;
      pen.fillText(text, x + 18, y + 7.5);
    }
  }
}

/** @param {{ duration: number, exposed: number, isExposed: boolean }} item */
function exposure({ duration, exposed, isExposed }) {
  if (!isExposed) return "hidden behind compute";
  if (!exposed) return "exposed: compute waited for it";
  if (exposed >= 0.996 * duration) return "exposed: compute waited for all of it";
  return `${formatDuration(exposed)} exposed, ${formatDuration(duration - exposed)} hidden`;
}

/**
 * 1, 2 or 5 times a power of ten, at least `us`.
 * @param {number} us
 */
function niceStep(us) {
  const power = 10 ** Math.floor(Math.log10(us));
  return power * (us / power > 5 ? 10 : us / power > 2 ? 5 : us / power > 1 ? 2 : 1);
}

/**
 * A time with as many digits as a pixel of the view resolves.
 * @param {number} us
 * @param {number} span
 */
function cursorTime(us, span) {
  const [divisor, unit] = timeUnit(us);
  const digits = Math.min(Math.max(Math.ceil(Math.log10((divisor * 1000) / span)), 0), 7);
  return `${(us / divisor).toFixed(digits)} ${unit}`;
}
