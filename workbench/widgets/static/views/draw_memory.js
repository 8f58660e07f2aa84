// Draws memory by class over time, of a few groups of ranks.

import { CATEGORIES, CATEGORY } from "../events.js";
import { formatBytes, formatTick, shorten } from "../format.js";
import { highest, memoryColumns } from "../memory_columns.js";
import { sure } from "../sure.js";
import { drawLines } from "./scene.js";

/** @import { Axis } from "../axis.js" */
/** @import { Areas } from "../memory_columns.js" */
/** @import { PeakInfo } from "../messages.js" */
/** @import { Memory } from "../series.js" */
/** @import { Pen } from "../sheet.js" */
/** @import { Scene, Skin } from "./scene.js" */

/** @typedef {{ label: string, series: Memory, peak: PeakInfo | undefined }} MemoryGroup */

const HEIGHTS = { one: 132, several: 84 };
export const MAX_AREAS = 4; // maximum number of groups of ranks drawn

/**
 * Height of the picture of some groups.
 * @param {number} numGroups
 */
export function memoryHeight(numGroups) {
  const count = Math.min(numGroups, MAX_AREAS);
  return Math.max(count, 1) * (count > 1 ? HEIGHTS.several : HEIGHTS.one);
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
