// Draws the items of the timeline: one by one, with names and arrows, on tracks with few of them in view; on the others
// each pixel gets the mean colour of its items.

import { KIND, KINDS } from "../events.js";
import { shorten } from "../format.js";
import { FONT } from "../look.js";
import { sure } from "../sure.js";
import { paintPixels } from "./colour_sums.js";
import { unitName } from "./item_words.js";
import { share } from "./items.js";
import { laneBox } from "./row_layout.js";

/** @import { Items } from "./items.js" */
/** @import { Painter, Picture } from "./painter.js" */
/** @import { Row } from "./row_layout.js" */

const MAX_RECTANGLES = 4000; // drawn one by one in a frame, all tracks together
const MAX_ARROWS = 48; // in a frame

/** @typedef {{ row: Row, first: number, last: number }} RowInView and the positions of its items in view */

/**
 * @param {Painter} painter
 * @param {Picture} picture
 */
export function drawItems(painter, picture) {
  const { rows, axis, open } = picture, most = Math.max(MAX_RECTANGLES / rows.length, 40);
  const seen = rows.map((row) => {
    const [first, last] = row.track.within(axis.t0, axis.t1);
    return { row, first, last };
  });
  const few = seen.filter(({ first, last }) => last - first <= most);
  const many = seen.filter(({ first, last }) => last - first > most);
  if (many.length) drawPixels(painter, picture, many.map(({ row }) => row));
  for (const { row, first, last } of few) {
    for (let k = first; k < last; k++) drawItem(painter, picture, row, row.track, k, sure(row.track.lane[k]));
  }
  for (const row of rows) {
    const items = open[row.index];
    items?.start.forEach((_, k) => { drawItem(painter, picture, row, items, k, 0); });
  }
  drawArrows(painter, picture, few);
}

/**
 * Draw tracks of many items: one line of pixels each, stretched.
 * @param {Painter} painter
 * @param {Picture} picture
 * @param {readonly Row[]} rows
 */
function drawPixels({ pen, look, lines, ratio, canvas }, { axis }, rows) {
  const width = canvas.width - Math.round(axis.left * ratio), pixels = lines.begin(width, rows.length);
  rows.forEach(({ track }, k) => {
    paintPixels(track, pixels, k * width, width, axis.t0, axis.span / width, look);
  });
  const image = lines.end();
  pen.imageSmoothingEnabled = false;
  rows.forEach(({ y, height }, k) => {
    pen.drawImage(image, 0, k, width, 1, axis.left, y, axis.width, height);
  });
}

/**
 * @param {Painter} painter
 * @param {Picture} picture
 * @param {Row} row
 * @param {Items} items
 * @param {number} k
 * @param {number} lane
 */
function drawItem({ pen, look, ratio }, { axis, units }, row, items, k, lane) {
  const snap = (/** @type {number} */ x) => Math.round(x * ratio) / ratio;
  const begin = axis.x(sure(items.start[k])), end = axis.x(sure(items.end[k]));
  const from = snap(Math.max(begin, axis.left - 2)), to = snap(Math.min(end, axis.right + 2));
  const gap = to - from > 5 ? 1 : 0; // neighbours stay apart
  const width = Math.max(to - from - gap, 1), { y, height } = laneBox(row, lane), kind = sure(items.kind[k]);
  pen.fillStyle = look.colour(kind);
  if (items !== row.track) pen.globalAlpha = 0.6;
  pen.fillRect(from, y, width, height);
  pen.globalAlpha = 1;
  const exposed = (end - begin) * share(sure(items.exposed[k]));
  if (exposed > 0 && kind !== KIND.WAIT) {
    const turn = Math.max(snap(end - exposed), from);
    pen.fillStyle = look.exposedCss;
    if (turn < from + width) pen.fillRect(turn, y, from + width - turn, height);
  }
  if (width <= 34 || height < 11) return; // no room for a name
  const unit = sure(items.unit[k]), isUnit = unit >= 0, name = isUnit ? unitName(units, unit) : sure(KINDS[kind]).words;
  const size = Math.min(11, height - 3), letters = Math.floor((width - 6) / (0.55 * size));
  if (letters < (isUnit ? Math.min(name.length, 9) : name.length)) return; // names of kinds are never cut
  pen.font = `${size}px ${FONT}`;
  Object.assign(pen, { fillStyle: look.textOn(kind), textAlign: "left", textBaseline: "middle" });
  pen.fillText(shorten(name, letters), from + 4, y + height / 2 + 0.5);
}

/**
 * Draw arrows from a collective's issue to the wait for it, where there is room.
 * @param {Painter} painter
 * @param {Picture} picture
 * @param {readonly RowInView[]} few
 */
function drawArrows(painter, picture, few) {
  const { axis } = picture, found = [];
  for (const { row, first, last } of few) {
    for (let k = first; k < last; k++) {
      const { start, end, arrowFrom } = row.track, length = sure(end[k]) - sure(start[k]);
      if (Number.isNaN(arrowFrom[k]) || axis.x(sure(end[k])) - axis.x(sure(start[k])) < 2) continue;
      found.push({ row, k, length });
    }
  }
  found.sort((a, b) => b.length - a.length);
  for (const { row, k } of found.slice(0, MAX_ARROWS)) {
    drawArrow(painter, picture, row, row.track, k, { alpha: 0.65, thickness: 1 });
  }
}

/**
 * @param {Painter} painter
 * @param {Picture} picture
 * @param {Row} row
 * @param {Items} items
 * @param {number} k
 * @param {{ alpha: number, thickness: number }} style
 */
function drawArrow({ pen, skin }, { axis, rows, tracks }, row, items, k, { alpha, thickness }) {
  const cause = tracks.issue(row.track, sure(items.arrowFrom[k]));
  const origin = cause && rows.find(({ track }) => track === cause.track);
  if (!origin) return;
  const x0 = axis.x(sure(items.arrowFrom[k])), x1 = axis.x(sure(items.start[k]));
  const down = origin.y < row.y ? 1 : -1;
  const y0 = down > 0 ? origin.y + origin.height : origin.y, y1 = down > 0 ? row.y : row.y + row.height;
  const bend = down * Math.max(8, 0.45 * Math.abs(y1 - y0));
  pen.globalAlpha = alpha;
  Object.assign(pen, { strokeStyle: skin.ink, fillStyle: skin.ink, lineWidth: thickness });
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

/**
 * Draw a frame around the item under the pointer, and its arrow.
 * @param {Painter} painter
 * @param {Picture} picture
 */
export function drawHovered(painter, picture) {
  const { hovered, axis } = picture;
  if (!hovered) return;
  const { row, items, k } = hovered, { pen, skin } = painter;
  const { y, height } = laneBox(row, items === row.track ? sure(row.track.lane[k]) : 0);
  const from = Math.max(axis.x(sure(items.start[k])), axis.left - 4);
  const to = Math.min(axis.x(sure(items.end[k])), axis.right + 4);
  Object.assign(pen, { strokeStyle: skin.ink, lineWidth: 2 });
  pen.strokeRect(from, y, Math.max(to - from, 2), height);
  if (!Number.isNaN(items.arrowFrom[k])) drawArrow(painter, picture, row, items, k, { alpha: 1, thickness: 1.6 });
}
