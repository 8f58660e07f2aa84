// Where the rows of the timeline and the entries of its legend are drawn. All sizes are pixels.

/** @import { Track } from "./track.js" */

export const AXIS_HEIGHT = 30;
const GAP = 9; // between two ranks
const ROW_HEIGHTS = /** @type {const} */ ([14, 22]); // least and most
const ROWS_HEIGHT = 640; // of all rows together, before they get lower
const NARROW = 560; // a timeline narrower than this has less room for labels
const LABELS_WIDTH = { narrow: 104, wide: 168 };
const SQUARE = 18; // of the legend, with the gap behind it
const BETWEEN_ENTRIES = 14; // of the legend
const LEGEND_LINE = 20;

export const OTHER = "other"; // track of collectives that have none of their own

/** @typedef {{ index: number, track: Track, name: string, y: number, height: number }} Row */

/** @typedef {{ kind: number, text: string, x: number, y: number, width: number }} LegendEntry */

/** @typedef {{ rows: readonly Row[], left: number, bottom: number }} RowLayout `left`: where the plot begins */

/**
 * Place the rows, by rank; tracks that are unused on all ranks are left out.
 * @param {readonly Track[]} tracks
 * @param {(track: Track, index: number) => boolean} isUsed
 * @param {number} width
 * @param {string} other the name of rows of other collectives
 * @returns {RowLayout}
 */
export function placeRows(tracks, isUsed, width, other) {
  const used = new Set(tracks.filter(isUsed).map(({ name }) => name));
  const seen = tracks.map((track, index) => ({ track, index })).filter(({ track }) => used.has(track.name));
  const [least, most] = ROW_HEIGHTS;
  const height = Math.round(Math.min(Math.max(ROWS_HEIGHT / Math.max(seen.length, 1), least), most));
  const rows = [];
  let y = AXIS_HEIGHT + 4;
  for (const rank of new Set(seen.map(({ track }) => track.rank))) {
    for (const { track, index } of seen.filter((entry) => entry.track.rank === rank)) {
      rows.push({ track, index, name: track.name === OTHER ? other : track.name, y, height: height - 2 });
      y += height;
    }
    y += GAP;
  }
  const left = width < NARROW ? LABELS_WIDTH.narrow : LABELS_WIDTH.wide;
  return { rows, left, bottom: Math.max(y - GAP, AXIS_HEIGHT + 60) };
}

/**
 * Place the legend's entries below the rows, wrapped into lines. `height`: of the timeline with its legend.
 * @param {readonly { kind: number, text: string, textWidth: number }[]} entries
 * @param {{ left: number, bottom: number, width: number }} around
 */
export function placeLegend(entries, { left: plotLeft, bottom, width }) {
  const widths = entries.map(({ textWidth }) => SQUARE + textWidth + BETWEEN_ENTRIES);
  const whole = widths.reduce((sum, each) => sum + each, 0);
  const left = Math.max(Math.min(plotLeft, width - whole), 4); // further left if all then fit into one line
  let x = left, y = bottom + 12;
  const legend = entries.map(({ kind, text }, k) => {
    const wide = widths[k] ?? 0;
    if (x + wide > width + BETWEEN_ENTRIES && x > left) [x, y] = [left, y + LEGEND_LINE];
    const entry = { kind, text, x, y, width: wide - BETWEEN_ENTRIES };
    x += wide;
    return entry;
  });
  return { legend, height: y + 26 };
}

/**
 * Position of the row at a height; -1: none.
 * @param {readonly Row[]} rows
 * @param {number} y
 */
export function rowAt(rows, y) {
  return rows.findIndex((row) => y >= row.y - 1 && y < row.y + row.height + 1);
}

/**
 * The legend's entry at a point; null: none.
 * @param {readonly LegendEntry[]} legend
 * @param {number} x
 * @param {number} y
 */
export function legendEntryAt(legend, x, y) {
  return legend.find((entry) => y >= entry.y && y < entry.y + LEGEND_LINE && x >= entry.x && x < entry.x + entry.width) ?? null;
}

/**
 * Where an item is drawn in its row.
 * @param {Row} row
 * @param {number} lane 0: the whole row; 1 and 2: its halves
 */
export function laneBox({ y, height }, lane) {
  const each = lane ? (height - 1) / 2 : height;
  return { y: lane === 2 ? y + each + 1 : y, height: each };
}
