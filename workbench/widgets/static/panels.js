// What the dashboard draws besides the timeline: memory by class, states of units, and a number per training step.
//
// Times are microseconds from the view's origin. Every panel draws the part of time that the timeline shows, between
// the same two lines of pixels, so that all share one axis and one cursor. A *series* is columns that grow: see series.js.

import { CATEGORIES, CATEGORY, UNIT_STATE, UNIT_STATES } from "./events.js";
import { formatBytes, shorten } from "./format.js";

const LABEL_FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif";

// -- a canvas

/** A canvas that is as wide as its parent, sharp on any screen, and drawn at most once a frame. */
export class Sheet {
  constructor(parent, className, draw) {
    this.canvas = document.createElement("canvas");
    this.canvas.className = className;
    parent.append(this.canvas);
    this.ctx = this.canvas.getContext("2d");
    this.draw = draw;
    this.height = 0;
  }

  /** Clear it and draw it, `height` pixels high. */
  paint(height, ...rest) {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    const size = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== size[0] || this.canvas.height !== size[1]) {
      [this.canvas.width, this.canvas.height] = size;
      this.canvas.style.height = `${height}px`;
    }
    this.ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.ctx.clearRect(0, 0, width, height);
    this.ctx.font = LABEL_FONT;
    this.draw(this.ctx, width, height, ...rest);
  }
}

/** The part of a canvas on which time runs: the timeline's plot, and what it shows. */
export class Axis {
  constructor(plot, view) {
    this.left = plot.left;
    this.width = plot.width;
    [this.t0, this.t1] = view;
  }

  x(t) {
    return this.left + ((t - this.t0) / (this.t1 - this.t0)) * this.width;
  }

  t(x) {
    return this.t0 + ((x - this.left) / this.width) * (this.t1 - this.t0);
  }
}

function drawCursorLine(ctx, axis, cursor, height, skin) {
  if (cursor === null || cursor < axis.t0 || cursor > axis.t1) return;
  ctx.fillStyle = skin.accent;
  ctx.fillRect(Math.round(axis.x(cursor)) - 0.5, 0, 1.5, height);
}

/** Thin lines where ranks were held and time is cut out. */
function drawHoldLines(ctx, axis, holds, height, skin) {
  ctx.fillStyle = skin.soft;
  for (const [at] of holds) {
    if (at < axis.t0 || at > axis.t1) continue;
    for (let y = 0; y < height; y += 5) ctx.fillRect(Math.round(axis.x(at)), y, 1, 3);
  }
}

// -- memory

export const MEMORY_HEIGHTS = [132, 84];
export const MAX_AREAS = 4; // groups of ranks that are drawn

/** Of each pixel the moment with most bytes: `[pixels + 1][classes]`, and the total in use. */
function memoryColumns(series, axis) {
  const pixels = Math.ceil(axis.width);
  const columns = new Float64Array((pixels + 1) * CATEGORIES.length), totals = new Float64Array(pixels + 1).fill(-1);
  let k = Math.max(series.last("t", axis.t0), 0), filled = -1;
  for (; k < series.length && series.t[k] <= axis.t1; k++) {
    const from = Math.max(Math.floor(axis.x(series.t[k]) - axis.left), 0);
    const until = k + 1 < series.length ? Math.floor(axis.x(series.t[k + 1]) - axis.left) : pixels;
    const bytes = series.bytes.subarray(k * CATEGORIES.length, (k + 1) * CATEGORIES.length);
    const total = bytes.reduce((sum, part) => sum + part, 0) - bytes[CATEGORY.RESERVED];
    for (let x = Math.min(from, pixels); x <= Math.min(until, pixels); x++) {
      if (x <= filled && totals[x] >= total) continue;
      columns.set(bytes, x * CATEGORIES.length);
      totals[x] = total;
    }
    filled = Math.max(filled, Math.min(until, pixels));
  }
  return { columns, totals, pixels };
}

export function drawMemory(ctx, width, height, { groups, axis, holds, cursor, skin, end }) {
  const shown = groups.slice(0, MAX_AREAS), each = height / Math.max(shown.length, 1);
  const found = shown.map((group) => memoryColumns(group.series, axis));
  const top = 1.12 * Math.max(1, ...found.map(({ columns, totals }) => highest(columns, totals)));
  const last = Math.min(axis.x(end), width);
  shown.forEach((group, place) => {
    const base = (place + 1) * each - 6, room = each - 12;
    ctx.fillStyle = skin.row;
    ctx.fillRect(axis.left, base - room, axis.width, room);
    drawAreas(ctx, found[place], { axis, base, scale: room / top, last, skin });
    drawMemoryScale(ctx, axis, base, room, top, skin);
    drawMemoryLabel(ctx, group, base - room, axis.left, skin);
    if (group.peak) drawPeak(ctx, group.peak, { axis, base, scale: room / top, skin, width });
  });
  drawHoldLines(ctx, axis, holds, height, skin);
  drawCursorLine(ctx, axis, cursor, height, skin);
}

function highest(columns, totals) {
  let most = 0;
  totals.forEach((total, x) => {
    if (total >= 0) most = Math.max(most, total + columns[x * CATEGORIES.length + CATEGORY.RESERVED]);
  });
  return most;
}

function drawAreas(ctx, { columns, totals, pixels }, { axis, base, scale, last, skin }) {
  const below = new Float64Array(pixels + 1);
  const until = Math.min(pixels, Math.floor(last - axis.left));
  CATEGORIES.forEach(({ colour }, index) => {
    ctx.fillStyle = colour;
    ctx.globalAlpha = index === CATEGORY.RESERVED ? 0.3 : 1;
    for (let x = 0; x < until; x++) {
      const bytes = totals[x] < 0 ? 0 : columns[x * CATEGORIES.length + index];
      if (bytes <= 0) continue;
      let run = x + 1; // equal neighbours become one rectangle
      while (run < until && columns[run * CATEGORIES.length + index] === bytes && below[run] === below[x] && totals[run] >= 0) run++;
      ctx.fillRect(axis.left + x, base - (below[x] + bytes) * scale, run - x, bytes * scale);
      for (; x < run; x++) below[x] += bytes;
      x -= 1;
    }
  });
  ctx.globalAlpha = 1;
  ctx.fillStyle = skin.ink;
  for (let x = 0; x < until; x++) {
    if (totals[x] < 0) continue;
    const y = base - totals[x] * scale, next = x + 1 < until && totals[x + 1] >= 0 ? base - totals[x + 1] * scale : y;
    ctx.fillRect(axis.left + x, Math.min(y, next), 1, Math.max(Math.abs(next - y), 1));
  }
}

function drawMemoryScale(ctx, axis, base, room, top, skin) {
  const most = top / 1.12;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  [0, 0.5, 1].forEach((share) => {
    const y = base - (room / 1.12) * share;
    ctx.fillStyle = skin.grid;
    ctx.fillRect(axis.left, Math.round(y), axis.width, 1);
    ctx.fillStyle = skin.soft;
    if (room > 70 || share !== 0.5) ctx.fillText(formatBytes(most * share), axis.left - 8, y);
  });
}

/** Beside the plot, or in its corner where there is no room beside the numbers of its scale. */
function drawMemoryLabel(ctx, group, y, left, skin) {
  const isBeside = left > 120, text = shorten(group.label, isBeside ? 13 : 24);
  if (!isBeside) {
    ctx.globalAlpha = 0.85;
    ctx.fillStyle = skin.page;
    ctx.fillRect(left, y, ctx.measureText(text).width + 8, 16);
    ctx.globalAlpha = 1;
  }
  Object.assign(ctx, { textAlign: "left", textBaseline: "top", fillStyle: skin.ink });
  ctx.fillText(text, isBeside ? 2 : left + 4, y + (isBeside ? 0 : 2));
}

function drawPeak(ctx, peak, { axis, base, scale, skin, width }) {
  const x = axis.x(peak.t_us), y = base - peak.num_bytes * scale;
  if (x < axis.left || x > axis.left + axis.width) return;
  ctx.beginPath();
  ctx.arc(x, y, 4, 0, 2 * Math.PI);
  ctx.fillStyle = skin.page;
  ctx.fill();
  Object.assign(ctx, { lineWidth: 2, strokeStyle: skin.peak });
  ctx.stroke();
  const text = `peak ${formatBytes(peak.num_bytes)}`, wide = ctx.measureText(text).width + 10;
  const at = x + 8 + wide > width ? x - 8 - wide : x + 8, middle = Math.max(y, 9);
  ctx.globalAlpha = 0.85;
  ctx.fillStyle = skin.page;
  ctx.fillRect(at, middle - 9, wide, 18);
  ctx.globalAlpha = 1;
  Object.assign(ctx, { fillStyle: skin.peak, textAlign: "left", textBaseline: "middle" });
  ctx.fillText(text, at + 5, middle + 0.5);
}

// -- states of units

const STATES_HEIGHT = 300; // that all rows may take together
const UNIT_HEIGHTS = [5, 20];

export function unitHeight(count) {
  return Math.max(Math.min(Math.floor(STATES_HEIGHT / Math.max(count, 1)), UNIT_HEIGHTS[1]), UNIT_HEIGHTS[0]);
}

/** `units`: a name and a series each; `now`: the state of each at the cursor. */
export function drawStates(ctx, width, height, { units, axis, now, holds, cursor, skin, end }) {
  const each = unitHeight(units.length), last = Math.min(axis.x(end), width);
  const every = Math.ceil(14 / each);
  units.forEach(({ name, series }, place) => {
    const y = place * each;
    ctx.fillStyle = skin.row;
    ctx.fillRect(axis.left, y + 1, axis.width, each - 2);
    drawUnit(ctx, series, { axis, y, each, last });
    if (now?.[place] !== undefined) {
      ctx.fillStyle = UNIT_STATES[now[place]].colour;
      ctx.fillRect(axis.left - 14, y + 2, 8, each - 4);
    }
    if (place % every) return;
    Object.assign(ctx, { fillStyle: skin.ink, textAlign: "right", textBaseline: "middle" });
    ctx.fillText(shorten(name, axis.left > 120 ? 20 : 10), axis.left - 20, y + each / 2 + 0.5);
  });
  drawHoldLines(ctx, axis, holds, height, skin);
  drawCursorLine(ctx, axis, cursor, height, skin);
}

function drawUnit(ctx, series, { axis, y, each, last }) {
  const from = Math.max(series.last("t", axis.t0), 0);
  for (let k = from; k < series.length && series.t[k] <= axis.t1; k++) {
    const begin = Math.max(axis.x(series.t[k]), axis.left);
    const end = Math.min(k + 1 < series.length ? axis.x(series.t[k + 1]) : last, axis.left + axis.width, last);
    if (end <= begin) continue;
    const state = series.state[k], thin = state === UNIT_STATE.SHARDED && each > 8 ? each * 0.36 : 1; // sharded holds little
    ctx.fillStyle = UNIT_STATES[state].colour;
    ctx.fillRect(begin, y + thin, Math.max(end - begin, 0.7), each - 2 * thin);
  }
}

// -- a number per step

/** A line over steps; the last of each pixel's lowest and highest are drawn. `value` is a column of `steps`. */
export function drawLine(ctx, width, height, { steps, value, colour, at, skin }) {
  const low = 4, room = height - 8, from = Math.max(steps.length - 400, 0);
  const model = steps.model[at === null ? steps.length - 1 : Math.max(steps.last("step", at), 0)];
  const known = []; // of one model: another one's numbers are another curve
  for (let k = from; k < steps.length; k++)
    if (Number.isFinite(steps[value][k]) && steps.model[k] === model) known.push(k);
  if (!known.length) return;
  const values = known.map((k) => steps[value][k]);
  const least = Math.min(...values), most = Math.max(...values), range = most - least || Math.abs(most) || 1;
  const first = steps.step[known[0]], span = Math.max(steps.step[known.at(-1)] - first, 1);
  const x = (k) => 3 + ((steps.step[k] - first) / span) * (width - 8);
  const y = (number) => low + room * (1 - (number - (most === least ? least - range / 2 : least)) / range);
  Object.assign(ctx, { strokeStyle: colour, lineWidth: 1.75, lineJoin: "round" });
  ctx.beginPath();
  known.forEach((k, place) => (place ? ctx.lineTo(x(k), y(values[place])) : ctx.moveTo(x(k), y(values[place]))));
  ctx.stroke();
  const here = at === null ? known.length - 1 : known.findLastIndex((k) => steps.step[k] <= at);
  if (here < 0) return;
  if (at !== null) {
    ctx.fillStyle = skin.accent;
    ctx.fillRect(Math.round(x(known[here])) - 0.5, 0, 1.5, height);
  }
  ctx.fillStyle = at === null ? colour : skin.accent;
  ctx.beginPath();
  ctx.arc(x(known[here]), y(values[here]), 3, 0, 2 * Math.PI);
  ctx.fill();
}
