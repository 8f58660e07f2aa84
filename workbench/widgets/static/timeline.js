// The timeline on a canvas: what each rank did when, of any number of rectangles, at the rate of the screen.
//
// Times are microseconds from the run's start, float64, without the time in which ranks were held: *holds* say where that
// was and how long, `[[at, length], ...]`. A *track* is one row (rank 0's waits); its *items* are
// rectangles in order of their start. `exposed`: 0 hidden behind compute; 1 compute waited for it, nobody knows how
// long; 2 to 255 compute waited for this share of it, in 1/255, at its end, which then has the colour of a wait.
// `arrowFrom` of a wait is the start of the collective it is for.
//
// Tracks with few items in view are drawn as rectangles, with the names of their units inside and arrows from issue to
// wait; of the others each pixel gets the mean colour of what happened in it: see track.js.

import { KIND, KINDS } from "./events.js";
import { formatBytes, formatDuration, shorten, timeUnit } from "./format.js";
import { isDark, makeLook } from "./look.js";
import { BLOCK, COLUMNS, MAX_STRADDLING, Track, gallop, paint, share } from "./track.js";

const MAX_ITEMS = 2e6; // of all tracks; of more those of the earlier half are forgotten
const MAX_RECTANGLES = 4000; // drawn one by one in a frame, all tracks together
const MAX_ARROWS = 48; // in a frame
const MAX_TRIES = 64; // additions to a rank after which nobody expects the collective of a wait any more
const MIN_SPAN = 0.5; // microseconds in view
const DRAG = 4; // pixels that tell a drag from a click
const AXIS = 30; // height of the axis, in pixels
const HOLD_REACH = 4; // pixels around the line of a hold
const GAP = 9; // between two ranks
const ROWS = [14, 22]; // height of a row
const TRACKS_HEIGHT = 640; // that all rows may take together before they get lower
export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif";
const LIGHT = {
  ink: "#2f3437", soft: "#5f6b73", grid: "rgba(60,70,80,0.13)", row: "rgba(60,70,80,0.055)", accent: "#0b63ce",
  onAccent: "#ffffff", tip: "#ffffff", tipEdge: "rgba(0,0,0,0.18)", selected: "rgba(11,99,206,0.08)",
};
const DARK = {
  ink: "#e4e7ea", soft: "#a3adb6", grid: "rgba(200,210,220,0.14)", row: "rgba(200,210,220,0.07)", accent: "#8ab8ff",
  onAccent: "#10151b", tip: "#252a30", tipEdge: "rgba(255,255,255,0.22)", selected: "rgba(138,184,255,0.12)",
};

// -- the timeline

/**
 * Draw a timeline on `canvas`, which may be any size: it takes the width of its parent, and the height it needs.
 *
 * `options`: `onFollow(isFollowing)`, `maxItems` that are kept. KINDS and KIND are those of events.js.
 */
export function createTimeline(canvas, options = {}) {
  return new Timeline(canvas, options).face();
}

class Timeline {
  constructor(canvas, options) {
    Object.assign(this, { canvas, options, ctx: canvas.getContext("2d") });
    Object.assign(this, { tracks: [], holds: [], units: [], kinds: new Set(), rows: [], waiting: 0,
      pending: [] });
    Object.assign(this, { t0: 0, t1: 1, low: Infinity, high: -Infinity, isTouched: false, isFollowing: false });
    Object.assign(this, { cursor: null, selected: 0, hovered: null, drag: null, frames: 0, drawMs: 0 });
    Object.assign(this, { onCursor: [], onHover: [], born: performance.now(), firstPaintMs: null });
    this.look = makeLook();
    this.image = document.createElement("canvas");
    this.ender = new AbortController();
    this.dress();
    this.listen();
    this.resize();
  }

  /** What a caller may do with it. */
  face() {
    return {
      setTracks: (tracks) => this.setTracks(tracks),
      append: (track, items) => this.append(track, items),
      skip: (track, count) => this.skip(track, count),
      setOpen: (track, items) => this.setOpen(track, items),
      setUnits: (units) => this.changed(() => (this.units = units.map(String))),
      setView: (t0, t1) => this.changed(() => this.touch(() => this.view(t0, t1))),
      fit: () => this.changed(() => this.whole()),
      follow: (on) => this.follow(Boolean(on)),
      setHolds: (holds) => this.changed(() => (this.holds = holds)),
      setCursor: (us) => this.changed(() => (this.cursor = us ?? null)),
      onCursor: (callback) => this.onCursor.push(callback),
      onHover: (callback) => this.onHover.push(callback),
      destroy: () => this.destroy(),
      stats: () => this.stats(),
    };
  }

  stats() {
    const { t0, t1, cursor, frames, drawMs, firstPaintMs, isFollowing, isDarkNow, hovered } = this;
    const rectangles = this.tracks.reduce((sum, track) => sum + track.length, 0);
    return { rectangles, rows: this.rows.length, frames, drawMs, firstPaintMs, view: [t0, t1], cursor, isFollowing,
      isDark: isDarkNow, hovered: hovered && this.describe(hovered), range: [this.low, this.high],
      plot: { left: this.left, top: AXIS, width: this.width - this.left }, counts: this.tracks.map((t) => t.forgotten + t.length),
      forgotten: this.forgotten(), holds: this.holds.map(([at, length]) => ({ at, length, x: this.x(at) })),
      places: this.rows.map(({ track, y, height }) => ({ name: track.name, label: track.label, y, height })) };
  }

  // -- data

  setTracks(tracks) {
    tracks.slice(this.tracks.length).forEach((track) => this.tracks.push(new Track(track)));
    this.changed(() => this.layOut());
  }

  append(index, items) {
    const track = this.tracks[index];
    const wasEmpty = !track.length;
    track.append(items);
    this.meet(items.kind);
    this.reach(items);
    this.expose(track, items);
    if (wasEmpty && items.start.length) this.layOut();
    if (this.tracks.reduce((sum, { length }) => sum + length, 0) > (this.options.maxItems ?? MAX_ITEMS)) this.forget();
    this.draw();
  }

  /** Keep what began in the later half, by number of items. */
  forget() {
    const before = (t) => this.tracks.map(({ start, length }) => gallop(start, length, 0, t));
    const sum = (counts) => counts.reduce((a, b) => a + b, 0);
    const half = sum(this.tracks.map(({ length }) => length)) / 2;
    let [low, high] = [this.low, this.high];
    for (let k = 0; k < 60 && high > low; k++) {
      const middle = (low + high) / 2;
      if (sum(before(middle)) < half) low = middle;
      else high = middle;
    }
    before(high).forEach((count, k) => this.tracks[k].forget(count));
    this.low = Math.min(...this.tracks.filter(({ length }) => length).map(({ start }) => start[0]));
    this.hovered = null;
    this.layOut();
  }

  /** Count items that nobody has any more. */
  skip(index, count) {
    this.tracks[index].forgotten += count;
    this.layOut();
    this.draw();
  }

  forgotten() {
    return this.tracks.reduce((sum, track) => sum + track.forgotten, 0);
  }

  /** Kinds get their entries in the legend. */
  meet(kinds) {
    const found = new Uint8Array(256);
    for (let k = 0; k < kinds.length; k++) found[kinds[k]] = 1;
    found.forEach((isThere, kind) => isThere && this.kinds.add(kind));
  }

  /** Give collectives the share that compute waited for; a wait may come before what it is for. */
  expose(track, items) {
    const { arrowFrom, start, end } = items;
    for (let k = 0; k < arrowFrom.length; k++) {
      const from = arrowFrom[k];
      if (!Number.isNaN(from)) this.pending.push({ track, from, start: start[k], end: end[k], tries: 0 });
    }
    if (this.pending.length) this.findCauses(track.rank);
  }

  findCauses(rank) {
    this.pending = this.pending.filter((wait) => {
      if (wait.track.rank !== rank) return true;
      const found = this.issue(wait.track, wait.from);
      if (!found) return (wait.tries += 1) < MAX_TRIES;
      const { track: { start, end, exposed }, k } = found;
      const waited = Math.min(end[k], wait.end) - Math.max(start[k], wait.start);
      if (waited > 0) {
        exposed[k] = Math.max(2, exposed[k], Math.round((255 * waited) / (end[k] - start[k])));
        found.track.summed = Math.min(found.track.summed, Math.floor(k / BLOCK));
      }
      return false;
    });
  }

  /** Show items that have not ended, in the place of those that were given before. */
  setOpen(index, items) {
    const track = this.tracks[index];
    const wasSeen = isSeen(track);
    track.open = items?.start.length ? items : null;
    if (track.open) {
      this.meet(items.kind);
      this.reach(items);
    }
    if (isSeen(track) !== wasSeen) this.layOut();
    this.draw();
  }

  reach({ start, end }) {
    for (let k = 0; k < start.length; k++) {
      if (start[k] < this.low) this.low = start[k];
      if (end[k] > this.high) this.high = end[k];
    }
    if (this.isFollowing) this.showLatest();
    else if (!this.isTouched) this.whole();
  }

  // -- what is in view

  view(t0, t1) {
    const range = Math.max(this.high - this.low, MIN_SPAN) || 1, margin = 0.02 * range;
    if (!Number.isFinite(range)) return Object.assign(this, { t0, t1 });
    const span = Math.min(Math.max(t1 - t0, MIN_SPAN), range + 2 * margin);
    const middle = (t0 + t1) / 2;
    const from = Math.min(Math.max(middle - span / 2, this.low - margin - span / 2), this.high + margin - span / 2);
    const isWhole = span >= range + 2 * margin;
    this.t0 = isWhole ? this.low - margin : from;
    return (this.t1 = this.t0 + span);
  }

  whole() {
    if (!(this.high >= this.low)) return;
    const margin = 0.02 * Math.max(this.high - this.low, MIN_SPAN);
    this.t0 = this.low - margin;
    this.t1 = this.high + margin;
  }

  showLatest() {
    const span = this.isTouched ? this.t1 - this.t0 : Infinity;
    if (span >= this.high - this.low) return this.whole();
    this.t1 = this.high + 0.02 * span;
    return (this.t0 = this.t1 - span);
  }

  follow(on) {
    this.isFollowing = on;
    if (on && this.high >= this.low) this.showLatest();
    this.draw();
  }

  /** The person moves it: it stays where it is put. */
  touch(change) {
    this.isTouched = true;
    change();
  }

  hold() {
    if (!this.isFollowing) return;
    this.isFollowing = false;
    this.options.onFollow?.(false);
  }

  zoom(factor, t) {
    const span = Math.max((this.t1 - this.t0) * factor, MIN_SPAN);
    const share = (t - this.t0) / (this.t1 - this.t0);
    const before = this.t1 - this.t0;
    this.touch(() => this.view(t - share * span, t + (1 - share) * span));
    this.draw();
    return this.t1 - this.t0 !== before;
  }

  pan(us) {
    this.hold();
    this.touch(() => this.view(this.t0 + us, this.t1 + us));
    this.draw();
  }

  x(t) {
    return this.left + ((t - this.t0) / (this.t1 - this.t0)) * (this.width - this.left);
  }

  t(x) {
    return this.t0 + ((x - this.left) / (this.width - this.left)) * (this.t1 - this.t0);
  }

  // -- the cursor

  putCursor(us, { isVisible = false } = {}) {
    this.hold();
    this.cursor = us;
    const span = this.t1 - this.t0;
    if (us !== null && isVisible && (us < this.t0 + 0.02 * span || us > this.t1 - 0.02 * span)) {
      this.touch(() => this.view(us - span / 2, us + span / 2));
    }
    this.sayCursor();
    this.onCursor.forEach((callback) => callback(us));
    this.draw();
  }

  /** Every begin and end on the selected rank after (or before) the cursor; the nearest. */
  step(direction) {
    const t = this.cursor ?? (direction > 0 ? this.t0 : this.t1);
    const rank = this.rows[this.selected]?.track.rank;
    let best = null;
    for (const { track } of this.rows) {
      if (track.rank !== rank) continue;
      for (const k of nearby(track, t)) {
        for (const edge of [track.start[k], track.end[k]]) {
          if ((edge - t) * direction > 0 && (best === null || (edge - best) * direction < 0)) best = edge;
        }
      }
    }
    if (best !== null) this.putCursor(best, { isVisible: true });
  }

  sayCursor() {
    const { canvas, cursor } = this;
    const [low, high] = [this.low, this.high].map((t) => (Number.isFinite(t) ? t : 0));
    canvas.setAttribute("aria-valuemin", String(Math.round(low)));
    canvas.setAttribute("aria-valuemax", String(Math.round(high)));
    this.saidHigh = this.high;
    canvas.setAttribute("aria-valuenow", String(Math.round(cursor ?? low)));
    const rank = this.rows[this.selected]?.track;
    const there = cursor === null || !rank ? [] : this.rows
      .filter(({ track }) => track.rank === rank.rank)
      .map(({ track }) => this.at(track, cursor))
      .filter((found) => found !== null)
      .map((found) => this.describe(found).title);
    const where = cursor === null ? "no cursor" : `${cursorTime(cursor, this.t1 - this.t0)} after the start`;
    canvas.setAttribute("aria-valuetext", [where, rank?.label, ...there].filter(Boolean).join(", "));
  }

  /** What goes on in a track at t: the item that began last. */
  at(track, t) {
    const last = gallop(track.start, track.length, 0, t + 1e-9);
    for (let k = last - 1; k >= Math.max(last - MAX_STRADDLING, 0); k--) {
      if (track.end[k] > t) return { track, items: track, k };
    }
    return null;
  }

  // -- hovering

  hit(x, y) {
    const row = this.rows.find((row) => y >= row.y - 1 && y < row.y + row.height + 1);
    if (!row || x < this.left) return null;
    const t = this.t(x), slack = (3 * (this.t1 - this.t0)) / (this.width - this.left);
    const { track } = row, half = y - row.y < row.height / 2 ? 1 : 2;
    const [first, last] = track.within(t - slack, t + slack);
    let best = null, distance = Infinity;
    for (let k = Math.max(first, last - 4 * MAX_STRADDLING); k < last; k++) {
      const away = Math.max(track.start[k] - t, t - track.end[k], 0) + (track.lane[k] === 3 - half ? slack : 0);
      if (away <= distance && away <= slack) [best, distance] = [{ track, items: track, k }, away];
    }
    for (let k = 0; k < (track.open?.start.length ?? 0); k++) {
      if (track.open.start[k] - slack <= t && t <= track.open.end[k] + slack) best = { track, items: track.open, k };
    }
    return best;
  }

  /** What an item is, in words and numbers. */
  describe({ track, items, k }) {
    const kind = items.kind[k], duration = items.end[k] - items.start[k];
    const unit = items.unit[k] >= 0 ? this.units[items.unit[k]] ?? `unit ${items.unit[k]}` : "";
    const cause = Number.isNaN(items.arrowFrom[k]) ? null : this.issue(track, items.arrowFrom[k]);
    const word = KINDS[kind].words;
    const what = kind === KIND.WAIT && cause ? `wait for ${KINDS[cause.track.kind[cause.k]].words}` : word;
    const exposed = duration * share(items.exposed[k]);
    return { kind, word, unit, duration, bytes: items.bytes[k], rank: track.rank, label: track.label,
      start: items.start[k], end: items.end[k], exposed, isExposed: items.exposed[k] > 0, hasEnded: items !== track.open,
      isCommunication: KINDS[kind].isCollective, title: unit ? `${what} of ${unit}` : what };
  }

  /** The collective of a wait's rank that began at `start`. */
  issue(wait, start) {
    let best = null, distance = 2; // microseconds: a sender may have rounded
    for (const track of this.tracks) {
      if (track.rank !== wait.rank || track === wait) continue;
      const near = gallop(track.start, track.length, 0, start);
      for (const k of [near - 1, near]) {
        const away = k >= 0 && k < track.length ? Math.abs(track.start[k] - start) : Infinity;
        if (away < distance) [best, distance] = [{ track, items: track, k }, away];
      }
    }
    return best;
  }

  showTip(x, y) {
    const said = this.describe(this.hovered);
    const size = said.bytes ? `${formatBytes(said.bytes)} \u00b7 ` : "";
    const lines = [said.title, `${size}${formatDuration(said.duration)}${said.hasEnded ? "" : ", not ended"}`];
    if (said.kind === KIND.WAIT) lines.push("exposed: compute stood still");
    else if (said.isCommunication) lines.push(exposure(said));
    lines.push(`${said.label}, from ${formatDuration(said.start)}`);
    this.putTip(lines, x, y);
  }

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

  /** The hold that is pointed at: its line is thin, and lies over what goes on around it. */
  holdAt(x) {
    return x === null ? undefined : this.holds.find(([at]) => Math.abs(this.x(at) - x) <= HOLD_REACH);
  }

  hover(x, y) {
    const hold = this.holdAt(x), found = x === null || hold ? null : this.hit(x, y);
    const isSame = found && this.hovered && found.items === this.hovered.items && found.k === this.hovered.k;
    this.hovered = found;
    if (found) this.showTip(x, y);
    else if (hold) this.putTip([`held ${formatDuration(hold[1])}: cut out`], x, y);
    else this.tip.style.display = "none";
    if (isSame || (!found && !this.wasHovered)) return;
    this.wasHovered = Boolean(found);
    this.onHover.forEach((callback) => callback(found && this.describe(found)));
    this.draw();
  }

  // -- the page

  dress() {
    const { canvas } = this;
    const parent = canvas.parentElement;
    if (getComputedStyle(parent).position === "static") parent.style.position = "relative";
    Object.assign(canvas.style, { display: "block", width: "100%", touchAction: "pan-y", cursor: "default",
      outline: "none", borderRadius: "4px", userSelect: "none" });
    canvas.tabIndex = 0;
    canvas.dataset.lmSuppressShortcuts = "true"; // JupyterLab would take the arrow keys before they get here
    canvas.setAttribute("role", "slider");
    canvas.setAttribute("aria-roledescription", "timeline");
    canvas.setAttribute("aria-orientation", "horizontal");
    if (!canvas.hasAttribute("aria-label")) {
      canvas.setAttribute("aria-label", "Timeline of the ranks. Arrow keys: from event to event, and up and down " +
        "between rows. Plus and minus: zoom. 0: everything.");
    }
    this.tip = document.createElement("div");
    this.tip.setAttribute("role", "tooltip");
    Object.assign(this.tip.style, { position: "absolute", display: "none", pointerEvents: "none", zIndex: 10,
      padding: "6px 9px", borderRadius: "5px", font: `12px/1.45 ${FONT}`, maxWidth: "340px", whiteSpace: "nowrap",
      overflow: "hidden", textOverflow: "ellipsis", boxShadow: "0 2px 10px rgba(0,0,0,0.22)" });
    parent.append(this.tip);
    this.sayCursor();
  }

  listen() {
    const { canvas } = this, options = { signal: this.ender.signal };
    const on = (name, action, more = {}) => canvas.addEventListener(name, action.bind(this), { ...options, ...more });
    on("pointerdown", this.pointerDown);
    on("pointermove", this.pointerMove);
    on("pointerup", this.pointerUp);
    on("pointercancel", () => (this.drag = null));
    on("pointerleave", () => this.hover(null));
    on("wheel", this.wheel, { passive: false });
    on("dblclick", () => this.changed(() => ((this.isTouched = false), this.whole())));
    on("keydown", this.key);
    on("focus", this.ring);
    on("blur", this.ring);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(canvas.parentElement);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", () => this.draw(), options);
    this.labTheme = new MutationObserver(() => this.draw());
    this.labTheme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  }

  destroy() {
    this.ender.abort();
    this.observer.disconnect();
    this.labTheme.disconnect();
    cancelAnimationFrame(this.waiting);
    this.waiting = -1;
    this.tip.remove();
    Object.assign(this, { tracks: [], rows: [], onCursor: [], onHover: [] });
  }

  ring() {
    const isSeen = document.activeElement === this.canvas && this.canvas.matches(":focus-visible");
    this.canvas.style.outline = isSeen ? `2px solid ${this.skin.accent}` : "none";
    this.canvas.style.outlineOffset = "-2px";
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  pointerDown(event) {
    if (event.button !== 0) return;
    const [x, y] = this.place(event);
    const nearCursor = this.cursor !== null && Math.abs(this.x(this.cursor) - x) < 4;
    this.drag = { x, y, t0: this.t0, t1: this.t1, isMoved: false, isScrub: y < AXIS || nearCursor };
    this.canvas.setPointerCapture(event.pointerId);
    if (y < AXIS && x >= this.left) this.putCursor(this.t(x));
  }

  pointerMove(event) {
    const [x, y] = this.place(event);
    const { drag } = this;
    this.canvas.style.cursor = drag?.isMoved ? (drag.isScrub ? "ew-resize" : "grabbing") : y < AXIS ? "ew-resize" : "default";
    if (!drag) return this.hover(x, y);
    drag.isMoved ||= Math.abs(x - drag.x) > DRAG;
    if (!drag.isMoved) return undefined;
    this.hover(null);
    if (drag.isScrub) return this.putCursor(Math.min(Math.max(this.t(x), this.low), this.high));
    const us = ((drag.x - x) / (this.width - this.left)) * (drag.t1 - drag.t0);
    return this.pan(drag.t0 + us - this.t0);
  }

  pointerUp(event) {
    const { drag } = this;
    this.drag = null;
    this.canvas.style.cursor = "default";
    if (!drag || drag.isMoved) return;
    const [x, y] = this.place(event);
    const row = this.rows.findIndex((row) => y >= row.y - 1 && y < row.y + row.height + 1);
    if (row >= 0) this.selected = row;
    if (x >= this.left && y >= AXIS) this.putCursor(this.t(x));
    else this.draw();
  }

  wheel(event) {
    const [x] = this.place(event);
    const isPan = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const pixels = (isPan ? event.deltaX || event.deltaY : event.deltaY) * (event.deltaMode === 1 ? 24 : 1);
    if (isPan) {
      event.preventDefault();
      return this.pan((pixels / (this.width - this.left)) * (this.t1 - this.t0));
    }
    const factor = Math.exp(Math.max(Math.min(pixels, 240), -240) * (event.ctrlKey ? 0.01 : 0.0025));
    this.hold();
    if (this.zoom(factor, this.t(Math.max(x, this.left)))) event.preventDefault(); // else the page scrolls on
    return this.hover(null);
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const middle = (this.t0 + this.t1) / 2, span = this.t1 - this.t0;
    const isInView = this.cursor !== null && this.cursor >= this.t0 && this.cursor <= this.t1;
    const zoom = (factor) => this.zoom(factor, isInView ? this.cursor : middle);
    const select = (by) => {
      this.selected = Math.min(Math.max(this.selected + by, 0), Math.max(this.rows.length - 1, 0));
      this.sayCursor();
      this.draw();
    };
    const actions = {
      ArrowRight: () => (event.shiftKey ? this.pan(span / 8) : this.step(1)),
      ArrowLeft: () => (event.shiftKey ? this.pan(-span / 8) : this.step(-1)),
      ArrowDown: () => select(1),
      ArrowUp: () => select(-1),
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), _: () => zoom(1 / 0.6),
      Home: () => this.high >= this.low && this.putCursor(this.low, { isVisible: true }),
      End: () => this.high >= this.low && this.putCursor(this.high, { isVisible: true }),
      PageUp: () => this.pan(-0.9 * span),
      PageDown: () => this.pan(0.9 * span),
      0: () => this.changed(() => ((this.isTouched = false), this.whole())),
      Escape: () => (this.hover(null), this.cursor !== null && this.putCursor(null)),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
    this.ring();
  }

  resize() {
    this.width = Math.max(this.canvas.parentElement.clientWidth, 200);
    this.layOut();
    this.draw();
  }

  changed(change) {
    change();
    this.draw();
  }

  /** Give every row its place: rows by rank, those left out that no rank has anything on. */
  layOut() {
    const used = new Set(this.tracks.filter(isSeen).map((track) => track.name));
    const seen = this.tracks.filter((track) => used.has(track.name));
    const ranks = new Set(seen.map((track) => track.rank));
    const height = Math.round(Math.min(Math.max(TRACKS_HEIGHT / Math.max(seen.length, 1), ROWS[0]), ROWS[1]));
    this.left = this.width < 560 ? 92 : 168;
    this.rows = [];
    let y = AXIS + 4;
    for (const rank of ranks) {
      for (const track of seen.filter((track) => track.rank === rank)) {
        this.rows.push({ track, y, height: height - 2 });
        y += height;
      }
      y += GAP;
    }
    this.bottom = Math.max(y - GAP, AXIS + 60);
    this.layOutLegend();
    this.canvas.style.height = `${this.height}px`;
  }

  /** Places of the legend's entries, which wrap. */
  layOutLegend() {
    const { ctx } = this;
    ctx.font = `12px ${FONT}`;
    const entries = [...this.kinds].sort((a, b) => a - b).map((kind) => {
      const word = KINDS[kind].words;
      const text = kind === KIND.WAIT ? `${word} (exposed)` : word;
      return [kind, text, 18 + ctx.measureText(text).width + 14];
    });
    const forgotten = this.forgotten();
    if (forgotten) {
      const text = `${forgotten.toLocaleString("en")} earlier ones are left out`;
      entries.push([null, text, ctx.measureText(text).width + 14]);
    }
    const whole = entries.reduce((sum, [, , width]) => sum + width, 0);
    const left = Math.max(Math.min(this.left, this.width - whole), 4); // further left if all then stand in one line
    let x = left, y = this.bottom + 12;
    this.legend = entries.map(([kind, text, width]) => {
      if (x + width > this.width + 14 && x > left) [x, y] = [left, y + 20];
      const entry = { kind, text, x, y };
      x += width;
      return entry;
    });
    this.height = y + 26;
  }

  // -- drawing

  /** Draw before the next picture of the screen, once. */
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
    const { canvas, ctx } = this, ratio = window.devicePixelRatio || 1;
    if (this.legend.filter(({ kind }) => kind !== null).length !== this.kinds.size) this.layOut();
    if (this.saidHigh !== this.high) this.sayCursor();
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    this.ratio = ratio;
    this.isDarkNow = isDark();
    this.skin = this.isDarkNow ? DARK : LIGHT;
    Object.assign(this.tip.style, { background: this.skin.tip, color: this.skin.ink,
      border: `1px solid ${this.skin.tipEdge}` });
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, this.width, this.height);
    if (!this.rows.length) return this.say("Nothing is recorded yet.");
    this.drawRows();
    this.drawAxis();
    this.clipped(() => {
      const few = this.drawItems();
      this.drawArrows(few);
      this.drawHovered();
    });
    this.drawHolds();
    this.drawCursor();
    this.drawLabels();
    return this.drawLegend();
  }

  say(sentence) {
    const { ctx } = this;
    ctx.font = `14px ${FONT}`;
    Object.assign(ctx, { fillStyle: this.skin.soft, textAlign: "center", textBaseline: "middle" });
    ctx.fillText(sentence, this.width / 2, this.height / 2);
  }

  clipped(action) {
    const { ctx } = this;
    ctx.save();
    ctx.beginPath();
    ctx.rect(this.left, AXIS, this.width - this.left, this.bottom - AXIS);
    ctx.clip();
    action();
    ctx.restore();
  }

  drawRows() {
    const { ctx } = this;
    this.rows.forEach(({ y, height }, k) => {
      ctx.fillStyle = this.skin.row;
      ctx.fillRect(this.left, y, this.width - this.left, height);
      if (k !== this.selected || document.activeElement !== this.canvas) return;
      ctx.fillStyle = this.skin.selected;
      ctx.fillRect(0, y, this.width, height);
    });
  }

  drawAxis() {
    const { ctx } = this, span = this.t1 - this.t0;
    const step = niceStep((span / (this.width - this.left)) * 110);
    const [divisor, unit] = timeUnit(Math.max(Math.abs(this.t1), step));
    const digits = Math.max(0, -Math.floor(Math.log10(step / divisor) + 1e-9));
    const flag = this.flag() ?? { left: Infinity, width: 0 };
    ctx.font = `11px ${FONT}`;
    Object.assign(ctx, { textAlign: "center", textBaseline: "middle" });
    for (let t = Math.ceil(this.t0 / step) * step; t <= this.t1; t += step) {
      const x = Math.round(this.x(t)) + 0.5 / this.ratio;
      ctx.fillStyle = this.skin.grid;
      ctx.fillRect(x, AXIS - 4, 1, this.bottom - AXIS + 4);
      ctx.fillStyle = this.skin.soft;
      const text = `${(t / divisor).toFixed(Math.min(digits, 9))} ${unit}`.replace(/^-(0(\.0*)?) /, "$1 ");
      const half = ctx.measureText(text).width / 2;
      const isFree = x + half + 4 < flag.left || x - half - 4 > flag.left + flag.width;
      if (isFree && x - half >= this.left - 8 && x + half <= this.width) ctx.fillText(text, x, 14);
    }
  }

  /** Draw what happened; returns the rows whose items were drawn one by one. */
  drawItems() {
    const few = [], many = [];
    const share = Math.max(MAX_RECTANGLES / this.rows.length, 40);
    for (const row of this.rows) {
      const [first, last] = row.track.within(this.t0, this.t1);
      if (last - first <= share) few.push({ row, first, last });
      else many.push(row);
    }
    if (many.length) this.drawMany(many);
    for (const { row, first, last } of few) {
      for (let k = first; k < last; k++) this.drawItem(row, row.track, k, row.track.lane[k]);
    }
    for (const row of this.rows) {
      for (let k = 0; k < (row.track.open?.start.length ?? 0); k++) this.drawItem(row, row.track.open, k, 0);
    }
    return few;
  }

  /** Tracks of many items: one line of pixels each, stretched. */
  drawMany(rows) {
    const { ctx, image, ratio } = this;
    const left = Math.round(this.left * ratio), width = this.canvas.width - left;
    if (image.width !== width || image.height !== rows.length) {
      Object.assign(image, { width, height: rows.length });
      this.data = image.getContext("2d").createImageData(width, rows.length);
      this.pixels = new Uint32Array(this.data.data.buffer);
    }
    this.pixels.fill(0);
    const step = (this.t1 - this.t0) / width;
    rows.forEach(({ track }, k) => {
      track.sumUp(this.look);
      paint(track, this.pixels, k * width, width, this.t0, step, this.look);
    });
    image.getContext("2d").putImageData(this.data, 0, 0);
    ctx.imageSmoothingEnabled = false;
    rows.forEach(({ y, height }, k) => {
      ctx.drawImage(image, 0, k, width, 1, this.left, y, this.width - this.left, height);
    });
  }

  drawItem(row, items, k, lane) {
    const { ctx, look, ratio } = this;
    const snap = (x) => Math.round(x * ratio) / ratio;
    const from = snap(Math.max(this.x(items.start[k]), this.left - 2));
    const to = snap(Math.min(this.x(items.end[k]), this.width + 2));
    const gap = to - from > 5 ? 1 : 0; // neighbours stay apart
    const width = Math.max(to - from - gap, 1);
    const height = lane ? (row.height - 1) / 2 : row.height, y = lane === 2 ? row.y + height + 1 : row.y;
    const kind = items.kind[k];
    ctx.fillStyle = look.colour(kind);
    if (items === row.track.open) ctx.globalAlpha = 0.6;
    ctx.fillRect(from, y, width, height);
    ctx.globalAlpha = 1;
    const whole = this.x(items.end[k]) - this.x(items.start[k]);
    const exposed = whole * share(items.exposed[k]);
    if (exposed > 0 && kind !== KIND.WAIT) {
      const begin = Math.max(snap(this.x(items.end[k]) - exposed), from);
      ctx.fillStyle = look.exposedCss;
      if (begin < from + width) ctx.fillRect(begin, y, from + width - begin, height);
    }
    if (width > 34 && height >= 11) this.drawName(items, k, from, y, width, height);
  }

  drawName(items, k, x, y, width, height) {
    const { ctx } = this, kind = items.kind[k];
    const isUnit = items.unit[k] >= 0, name = isUnit ? this.units[items.unit[k]] ?? "" : KINDS[kind].words;
    const size = Math.min(11, height - 3);
    const letters = Math.floor((width - 6) / (0.55 * size));
    if (!name || letters < (isUnit ? Math.min(name.length, 9) : name.length)) return; // what a colour says: all or nothing
    ctx.font = `${size}px ${FONT}`;
    Object.assign(ctx, { fillStyle: this.look.textOn(kind), textAlign: "left", textBaseline: "middle" });
    ctx.fillText(shorten(name, letters), x + 4, y + height / 2 + 0.5);
  }

  /** Lead from a collective's issue to the wait for it, where there is room to see it. */
  drawArrows(few) {
    const found = [];
    for (const { row, first, last } of few) {
      for (let k = first; k < last; k++) {
        const from = row.track.arrowFrom[k];
        if (Number.isNaN(from) || this.x(row.track.end[k]) - this.x(row.track.start[k]) < 2) continue;
        found.push({ row, k, length: row.track.end[k] - row.track.start[k] });
      }
    }
    found.sort((a, b) => b.length - a.length);
    found.slice(0, MAX_ARROWS).forEach(({ row, k }) => this.drawArrow(row, row.track, k, 0.65, 1));
  }

  drawArrow(row, items, k, alpha, thickness) {
    const cause = this.issue(row.track, items.arrowFrom[k]);
    const origin = cause && this.rows.find(({ track }) => track === cause.track);
    if (!origin) return;
    const { ctx } = this;
    const x0 = this.x(items.arrowFrom[k]), x1 = this.x(items.start[k]);
    const down = origin.y < row.y ? 1 : -1;
    const y0 = down > 0 ? origin.y + origin.height : origin.y, y1 = down > 0 ? row.y : row.y + row.height;
    const bend = down * Math.max(8, 0.45 * Math.abs(y1 - y0));
    ctx.globalAlpha = alpha;
    Object.assign(ctx, { strokeStyle: this.skin.ink, fillStyle: this.skin.ink, lineWidth: thickness });
    ctx.beginPath();
    ctx.moveTo(x0, y0);
    ctx.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1 - 4 * down);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x1, y1 + down);
    ctx.lineTo(x1 - 3.2, y1 - 5.5 * down);
    ctx.lineTo(x1 + 3.2, y1 - 5.5 * down);
    ctx.fill();
    ctx.beginPath();
    ctx.arc(x0, y0, 2, 0, 2 * Math.PI);
    ctx.fill();
    ctx.globalAlpha = 1;
  }

  drawHovered() {
    if (!this.hovered) return;
    const { track, items, k } = this.hovered, row = this.rows.find((row) => row.track === track);
    if (!row) return;
    const { ctx } = this, lane = items === track ? track.lane[k] : 0;
    const height = lane ? (row.height - 1) / 2 : row.height, y = lane === 2 ? row.y + height + 1 : row.y;
    const from = Math.max(this.x(items.start[k]), this.left - 4);
    const to = Math.min(this.x(items.end[k]), this.width + 4);
    Object.assign(ctx, { strokeStyle: this.skin.ink, lineWidth: 2 });
    ctx.strokeRect(from, y, Math.max(to - from, 2), height);
    if (!Number.isNaN(items.arrowFrom[k])) this.drawArrow(row, items, k, 1, 1.6);
  }

  /** Where the cursor says its time, above it; null where it is not in view. */
  flag() {
    if (this.cursor === null || this.cursor < this.t0 || this.cursor > this.t1) return null;
    const { ctx } = this, text = cursorTime(this.cursor, this.t1 - this.t0), x = this.x(this.cursor);
    ctx.font = `600 11px ${FONT}`;
    const width = ctx.measureText(text).width + 12;
    return { text, x, width, left: Math.min(Math.max(x - width / 2, this.left), this.width - width) };
  }

  /** A thin line, with a mark of two bars in the axis, where ranks were held. */
  drawHolds() {
    const { ctx } = this;
    ctx.fillStyle = this.skin.ink;
    for (const [at] of this.holds) {
      if (at < this.t0 || at > this.t1) continue;
      const x = Math.round(this.x(at));
      for (let y = AXIS; y < this.bottom; y += 5) ctx.fillRect(x, y, 1, 3);
      for (const side of [-3, 2]) ctx.fillRect(x + side, AXIS - 9, 2, 7);
    }
  }

  drawCursor() {
    const flag = this.flag();
    if (!flag) return;
    const { ctx } = this;
    ctx.fillStyle = this.skin.accent;
    ctx.fillRect(Math.round(flag.x) - 0.75, AXIS - 7, 1.5, this.bottom - AXIS + 7);
    ctx.beginPath();
    ctx.roundRect(flag.left, 5, flag.width, 18, 4);
    ctx.fill();
    Object.assign(ctx, { fillStyle: this.skin.onAccent, textAlign: "center", textBaseline: "middle" });
    ctx.fillText(flag.text, flag.left + flag.width / 2, 14.5);
  }

  drawLabels() {
    const { ctx } = this;
    ctx.textBaseline = "middle";
    let before = null;
    for (const { track, y, height } of this.rows) {
      const size = Math.min(12, height);
      ctx.font = `${size}px ${FONT}`;
      Object.assign(ctx, { textAlign: "right", fillStyle: this.skin.soft });
      ctx.fillText(track.name, this.left - 10, y + height / 2 + 0.5);
      if (track.rank !== before) {
        ctx.font = `600 ${size}px ${FONT}`;
        Object.assign(ctx, { textAlign: "left", fillStyle: this.skin.ink });
        const room = this.left < 120 ? 0 : 10;
        if (room) ctx.fillText(shorten(track.label, room), 4, y + height / 2 + 0.5);
        else ctx.fillText(`${track.rank}`, 4, y + height / 2 + 0.5);
      }
      before = track.rank;
    }
    ctx.font = `11px ${FONT}`;
    Object.assign(ctx, { textAlign: "left", fillStyle: this.skin.soft });
    ctx.fillText(`${formatDuration(this.t1 - this.t0)} in view`, 4, 14);
  }

  drawLegend() {
    const { ctx } = this;
    ctx.font = `12px ${FONT}`;
    Object.assign(ctx, { textAlign: "left", textBaseline: "middle" });
    for (const { kind, text, x, y } of this.legend) {
      if (kind !== null) {
        ctx.fillStyle = this.look.colour(kind);
        ctx.beginPath();
        ctx.roundRect(x, y + 1, 12, 12, 2);
        ctx.fill();
      }
      ctx.fillStyle = this.skin.soft;
      ctx.fillText(text, kind === null ? x : x + 18, y + 7.5);
    }
  }
}

function isSeen(track) {
  return track.length > 0 || track.open !== null;
}

/** Positions of items whose begin or end may be the next one after t, or the last one before it. */
function* nearby(track, t) {
  const near = gallop(track.start, track.length, 0, t);
  for (let k = Math.max(near - MAX_STRADDLING, 0); k < Math.min(near + 4, track.length); k++) yield k;
}

function exposure({ duration, exposed, isExposed }) {
  if (!isExposed) return "hidden behind compute";
  if (!exposed) return "exposed: compute waited for it";
  if (exposed >= 0.996 * duration) return "exposed: compute waited for all of it";
  return `${formatDuration(exposed)} exposed, ${formatDuration(duration - exposed)} hidden`;
}

/** 1, 2 or 5 times a power of ten, at least `us`. */
function niceStep(us) {
  const power = 10 ** Math.floor(Math.log10(us));
  return power * (us / power > 5 ? 10 : us / power > 2 ? 5 : us / power > 1 ? 2 : 1);
}

/** A time with as many digits as a pixel of the view tells apart. */
function cursorTime(us, span) {
  const [divisor, unit] = timeUnit(us);
  const digits = Math.min(Math.max(Math.ceil(Math.log10((divisor * 1000) / span)), 0), 7);
  return `${(us / divisor).toFixed(digits)} ${unit}`;
}
