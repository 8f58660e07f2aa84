// What the dashboard draws besides the timeline: memory by class, states of units, and a number per training step.
//
// Times are microseconds from the view's origin. Every panel draws the time that the timeline shows, between the same
// horizontal positions, so that all share one axis and one cursor.

import { CATEGORIES, CATEGORY, UNIT_STATE, UNIT_STATES } from "./events.js";
import { formatBytes, formatTick, shorten } from "./format.js";
import { FONT, penOf } from "./look.js";
import { lastUpTo } from "./series.js";
import { sure } from "./sure.js";

/** @import { PeakInfo } from "./messages.js" */
/** @import { Changes, Memory, Steps } from "./series.js" */

/** @typedef {CanvasRenderingContext2D} Pen */

/** @typedef {Record<"page" | "ink" | "soft" | "row" | "grid" | "accent" | "peak", string>} Skin colours of the page */

/**
 * What all panels over time share.
 * @typedef {object} Scene
 * @property {Axis} axis
 * @property {readonly (readonly [number, number])[]} holds
 * @property {number | null} cursor
 * @property {number} end end of the known time
 * @property {Skin} skin
 */

/** @typedef {{ label: string, series: Memory, peak: PeakInfo | undefined }} MemoryGroup */

/** @typedef {{ name: string, series: Changes, now: number | undefined }} UnitRow `now`: its state at the cursor */

/** @typedef {"loss" | "ms" | "exposed"} Value a column of steps */

/** A canvas that is as wide as its parent, sharp on any screen. */
export class Sheet {
  /**
   * @param {HTMLElement} parent
   * @param {string} className
   */
  constructor(parent, className) {
    this.parent = parent;
    this.canvas = document.createElement("canvas");
    this.canvas.className = className;
    parent.append(this.canvas);
    this.pen = penOf(this.canvas);
  }

  /**
   * Clear the canvas and draw on it.
   * @param {number} height in pixels
   * @param {(pen: Pen, width: number, height: number) => void} draw
   */
  paint(height, draw) {
    const width = this.parent.clientWidth;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    const wide = Math.round(width * ratio), high = Math.round(height * ratio);
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      Object.assign(this.canvas, { width: wide, height: high });
      this.canvas.style.height = `${height}px`;
    }
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.pen.clearRect(0, 0, width, height);
    this.pen.font = `12px ${FONT}`;
    draw(this.pen, width, height);
  }
}

/** The time axis of a canvas: the extent of the timeline's plot, and its view. */
export class Axis {
  /**
   * @param {{ left: number, width: number }} plot
   * @param {readonly [number, number]} view
   */
  constructor(plot, [t0, t1]) {
    this.left = plot.left;
    this.width = plot.width;
    this.t0 = t0;
    this.t1 = t1;
  }

  /** @param {number} t */
  x(t) {
    return this.left + ((t - this.t0) / (this.t1 - this.t0)) * this.width;
  }

  /** @param {number} x */
  t(x) {
    return this.t0 + ((x - this.left) / this.width) * (this.t1 - this.t0);
  }
}

/**
 * Draw the cursor, and thin lines where ranks were held and time is cut out.
 * @param {Pen} pen
 * @param {number} height
 * @param {Scene} scene
 */
function drawLines(pen, height, { axis, holds, cursor, skin }) {
  const isSeen = (/** @type {number} */ t) => t >= axis.t0 && t <= axis.t1;
  pen.fillStyle = skin.soft;
  for (const [at] of holds.filter(([t]) => isSeen(t))) {
    for (let y = 0; y < height; y += 5) pen.fillRect(Math.round(axis.x(at)), y, 1, 3);
  }
  if (cursor === null || !isSeen(cursor)) return;
  pen.fillStyle = skin.accent;
  pen.fillRect(Math.round(axis.x(cursor)) - 0.5, 0, 1.5, height);
}

// -- memory

export const MEMORY_HEIGHTS = { one: 132, several: 84 };
export const MAX_AREAS = 4; // maximum number of groups of ranks drawn

/** @typedef {{ columns: Float64Array, totals: Float64Array, pixels: number }} Areas */

/**
 * For each pixel the moment with the most bytes: `[pixels + 1][classes]`, and the total in use.
 * @param {Memory} series
 * @param {Axis} axis
 * @returns {Areas}
 */
function memoryColumns(series, axis) {
  const pixels = Math.ceil(axis.width), { t, length } = series;
  const columns = new Float64Array((pixels + 1) * CATEGORIES.length), totals = new Float64Array(pixels + 1).fill(-1);
  let filled = -1;
  for (let k = Math.max(lastUpTo(t, length, axis.t0), 0); k < length && sure(t[k]) <= axis.t1; k++) {
    const from = Math.max(Math.floor(axis.x(sure(t[k])) - axis.left), 0);
    const until = k + 1 < length ? Math.floor(axis.x(sure(t[k + 1])) - axis.left) : pixels;
    const bytes = series.bytes(k);
    const total = bytes.reduce((sum, part) => sum + part, 0) - sure(bytes[CATEGORY.RESERVED]);
    for (let x = Math.min(from, pixels); x <= Math.min(until, pixels); x++) {
      if (x <= filled && sure(totals[x]) >= total) continue;
      columns.set(bytes, x * CATEGORIES.length);
      totals[x] = total;
    }
    filled = Math.max(filled, Math.min(until, pixels));
  }
  return { columns, totals, pixels };
}

/**
 * Draw the memory of a few groups of ranks, one below the other.
 * @param {Pen} pen
 * @param {number} width
 * @param {number} height
 * @param {Scene & { groups: MemoryGroup[] }} scene
 */
export function drawMemory(pen, width, height, scene) {
  const { groups, axis, skin, end } = scene;
  const shown = groups.slice(0, MAX_AREAS), each = height / Math.max(shown.length, 1);
  const found = shown.map(({ series }) => memoryColumns(series, axis));
  const top = 1.12 * Math.max(1, ...found.map(highest));
  const last = Math.min(axis.x(end), width);
  shown.forEach((group, place) => {
    const base = (place + 1) * each - 6, room = each - 12;
    pen.fillStyle = skin.row;
    pen.fillRect(axis.left, base - room, axis.width, room);
    drawAreas(pen, sure(found[place]), { axis, base, scale: room / top, last, skin });
    drawMemoryScale(pen, { axis, base, room, top, skin });
    drawMemoryLabel(pen, group.label, { y: base - room, left: axis.left, skin });
    if (group.peak) drawPeak(pen, group.peak, { axis, base, scale: room / top, skin, width });
  });
  drawLines(pen, height, scene);
}

/** @param {Areas} areas */
function highest({ columns, totals }) {
  let most = 0;
  totals.forEach((total, x) => {
    if (total >= 0) most = Math.max(most, total + sure(columns[x * CATEGORIES.length + CATEGORY.RESERVED]));
  });
  return most;
}

/**
 * @param {Pen} pen
 * @param {Areas} areas
 * @param {{ axis: Axis, base: number, scale: number, last: number, skin: Skin }} where
 */
function drawAreas(pen, { columns, totals, pixels }, { axis, base, scale, last, skin }) {
  const below = new Float64Array(pixels + 1);
  const until = Math.min(pixels, Math.floor(last - axis.left));
  CATEGORIES.forEach(({ colour }, index) => {
    pen.fillStyle = colour;
    pen.globalAlpha = index === CATEGORY.RESERVED ? 0.3 : 1;
    for (let x = 0; x < until; x++) {
      const bytes = sure(totals[x]) < 0 ? 0 : sure(columns[x * CATEGORIES.length + index]);
      if (bytes <= 0) continue;
      const isLike = (/** @type {number} */ other) => sure(totals[other]) >= 0 && below[other] === below[x] &&
        columns[other * CATEGORIES.length + index] === bytes;
      let run = x + 1; // equal neighbours become one rectangle
      while (run < until && isLike(run)) run++;
      pen.fillRect(axis.left + x, base - (sure(below[x]) + bytes) * scale, run - x, bytes * scale);
      for (; x < run; x++) below[x] = sure(below[x]) + bytes;
      x -= 1;
    }
  });
  pen.globalAlpha = 1;
  pen.fillStyle = skin.ink;
  for (let x = 0; x < until; x++) {
    if (sure(totals[x]) < 0) continue;
    const y = base - sure(totals[x]) * scale;
    const next = x + 1 < until && sure(totals[x + 1]) >= 0 ? base - sure(totals[x + 1]) * scale : y;
    pen.fillRect(axis.left + x, Math.min(y, next), 1, Math.max(Math.abs(next - y), 1));
  }
}

/**
 * @param {Pen} pen
 * @param {{ axis: Axis, base: number, room: number, top: number, skin: Skin }} where
 */
function drawMemoryScale(pen, { axis, base, room, top, skin }) {
  const most = top / 1.12;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const step = 2 ** Math.ceil(Math.log2(Math.max(most, 1) / (room > 70 ? 3 : 1.5)));
  for (let bytes = 0; bytes <= most; bytes += step) {
    const y = base - (room / top) * bytes;
    pen.fillStyle = skin.grid;
    pen.fillRect(axis.left, Math.round(y), axis.width, 1);
    pen.fillStyle = skin.soft;
    pen.fillText(formatTick(bytes), axis.left - 8, y);
  }
}

/**
 * Draw the label left of the plot, or in its corner where the numbers of the scale leave no room.
 * @param {Pen} pen
 * @param {string} label
 * @param {{ y: number, left: number, skin: Skin }} where
 */
function drawMemoryLabel(pen, label, { y, left, skin }) {
  const isBeside = left > 120, text = shorten(label, isBeside ? 13 : 24);
  if (!isBeside) {
    pen.globalAlpha = 0.85;
    pen.fillStyle = skin.page;
    pen.fillRect(left, y, pen.measureText(text).width + 8, 16);
    pen.globalAlpha = 1;
  }
  Object.assign(pen, { textAlign: "left", textBaseline: "top", fillStyle: skin.ink });
  pen.fillText(text, isBeside ? 2 : left + 4, y + (isBeside ? 0 : 2));
}

/**
 * @param {Pen} pen
 * @param {PeakInfo} peak
 * @param {{ axis: Axis, base: number, scale: number, skin: Skin, width: number }} where
 */
function drawPeak(pen, peak, { axis, base, scale, skin, width }) {
  const x = axis.x(peak.t_us), y = base - peak.num_bytes * scale;
  if (x < axis.left || x > axis.left + axis.width) return;
  pen.beginPath();
  pen.arc(x, y, 4, 0, 2 * Math.PI);
  pen.fillStyle = skin.page;
  pen.fill();
  Object.assign(pen, { lineWidth: 2, strokeStyle: skin.peak });
  pen.stroke();
  const text = `peak ${formatBytes(peak.num_bytes)}`, wide = pen.measureText(text).width + 10;
  const at = x + 8 + wide > width ? x - 8 - wide : x + 8, middle = Math.max(y, 9);
  pen.globalAlpha = 0.85;
  pen.fillStyle = skin.page;
  pen.fillRect(at, middle - 9, wide, 18);
  pen.globalAlpha = 1;
  Object.assign(pen, { fillStyle: skin.peak, textAlign: "left", textBaseline: "middle" });
  pen.fillText(text, at + 5, middle + 0.5);
}

// -- states of units

const STATES_HEIGHT = 300; // of all rows together, at most
const UNIT_HEIGHTS = /** @type {const} */ ([5, 20]);

/**
 * Height of one unit's row, with `count` rows.
 * @param {number} count
 */
export function unitHeight(count) {
  return Math.max(Math.min(Math.floor(STATES_HEIGHT / Math.max(count, 1)), UNIT_HEIGHTS[1]), UNIT_HEIGHTS[0]);
}

/**
 * @param {Pen} pen
 * @param {number} width
 * @param {number} height
 * @param {Scene & { units: UnitRow[] }} scene
 */
export function drawStates(pen, width, height, scene) {
  const { units, axis, skin, end } = scene;
  const each = unitHeight(units.length), last = Math.min(axis.x(end), width);
  const every = Math.ceil(14 / each);
  units.forEach(({ name, series, now }, place) => {
    const y = place * each;
    pen.fillStyle = skin.row;
    pen.fillRect(axis.left, y + 1, axis.width, each - 2);
    drawUnit(pen, series, { axis, y, each, last });
    if (now !== undefined) {
      pen.fillStyle = sure(UNIT_STATES[now]).colour;
      pen.fillRect(axis.left - 14, y + 2, 8, each - 4);
    }
    if (place % every) return;
    Object.assign(pen, { fillStyle: skin.ink, textAlign: "right", textBaseline: "middle" });
    pen.fillText(shorten(name, axis.left > 120 ? 20 : 10), axis.left - 20, y + each / 2 + 0.5);
  });
  drawLines(pen, height, scene);
}

/**
 * @param {Pen} pen
 * @param {Changes} series
 * @param {{ axis: Axis, y: number, each: number, last: number }} where
 */
function drawUnit(pen, { t, state: states, length }, { axis, y, each, last }) {
  for (let k = Math.max(lastUpTo(t, length, axis.t0), 0); k < length && sure(t[k]) <= axis.t1; k++) {
    const begin = Math.max(axis.x(sure(t[k])), axis.left);
    const end = Math.min(k + 1 < length ? axis.x(sure(t[k + 1])) : last, axis.left + axis.width, last);
    if (end <= begin) continue;
    const state = sure(states[k]), thin = state === UNIT_STATE.SHARDED && each > 8 ? each * 0.36 : 1; // it holds little
    pen.fillStyle = sure(UNIT_STATES[state]).colour;
    pen.fillRect(begin, y + thin, Math.max(end - begin, 0.7), each - 2 * thin);
  }
}

// -- a number per step

const STEPS_SHOWN = 400;

/**
 * Draw a line over the last steps.
 * @param {Pen} pen
 * @param {number} width
 * @param {number} height
 * @param {{ steps: Steps, value: Value, colour: string, at: number | null, skin: Skin }} what `at`: number of a step
 */
export function drawLine(pen, width, height, { steps, value, colour, at, skin }) {
  const low = 4, room = height - 8, from = Math.max(steps.length - STEPS_SHOWN, 0), { columns } = steps;
  const model = columns.model[at === null ? steps.length - 1 : Math.max(steps.numbered(at), 0)];
  const all = []; // of one model: the numbers of another are another curve
  for (let k = from; k < steps.length; k++) if (columns.model[k] === model) all.push(k);
  const known = all.filter((k) => Number.isFinite(columns[value][k]));
  if (!known.length) return;
  const values = known.map((k) => sure(columns[value][k]));
  const least = Math.min(...values), most = Math.max(...values), range = most - least || Math.abs(most) || 1;
  const first = sure(columns.step[sure(all[0])]), span = Math.max(sure(columns.step[sure(all.at(-1))]) - first, 1);
  const x = (/** @type {number} */ k) => 3 + ((sure(columns.step[k]) - first) / span) * (width - 8);
  const base = most === least ? least - range / 2 : least;
  const y = (/** @type {number} */ k) => low + room * (1 - (sure(columns[value][k]) - base) / range);
  Object.assign(pen, { strokeStyle: colour, lineWidth: 1.75, lineJoin: "round" });
  pen.beginPath();
  for (const [place, k] of known.entries()) {
    if (place) pen.lineTo(x(k), y(k));
    else pen.moveTo(x(k), y(k));
  }
  pen.stroke();
  const here = at === null ? all.at(-1) : all.findLast((k) => sure(columns.step[k]) <= at);
  if (here === undefined) return;
  if (at !== null) {
    pen.fillStyle = skin.accent;
    pen.fillRect(Math.round(x(here)) - 0.5, 0, 1.5, height);
  }
  if (!Number.isFinite(columns[value][here])) return; // it is not on the line
  pen.fillStyle = at === null ? colour : skin.accent;
  pen.beginPath();
  pen.arc(x(here), y(here), 3, 0, 2 * Math.PI);
  pen.fill();
}
