// Draws the timeline on its canvas: rows, axis, items, holds, cursor, labels and legend.

import { cursorTime } from "../axis.js";
import { formatDuration, shorten } from "../format.js";
import { FONT, Look, isDark, penOf } from "../look.js";
import { drawHovered, drawItems } from "./item_painter.js";
import { AXIS_HEIGHT } from "./row_layout.js";

/** @import { Axis } from "../axis.js" */
/** @import { FoundItem, Hold } from "./find_item.js" */
/** @import { Items } from "./items.js" */
/** @import { LegendEntry, RowLayout } from "./row_layout.js" */
/** @import { Tracks } from "./tracks.js" */

const LIGHT = {
  ink: "#2f3437", soft: "#5f6b73", grid: "rgba(60,70,80,0.13)", row: "rgba(60,70,80,0.055)", accent: "#0b63ce",
  onAccent: "#ffffff", tip: "#ffffff", tipEdge: "rgba(0,0,0,0.18)", selected: "rgba(11,99,206,0.08)",
};
const DARK = {
  ink: "#e4e7ea", soft: "#a3adb6", grid: "rgba(200,210,220,0.14)", row: "rgba(200,210,220,0.07)", accent: "#8ab8ff",
  onAccent: "#10151b", tip: "#252a30", tipEdge: "rgba(255,255,255,0.22)", selected: "rgba(138,184,255,0.12)",
};

/** @typedef {typeof LIGHT} TimelineSkin */

/**
 * All that a frame shows.
 * @typedef {object} Picture
 * @property {RowLayout["rows"]} rows
 * @property {readonly LegendEntry[]} legend
 * @property {Axis} axis
 * @property {number} width in pixels, as all sizes
 * @property {number} bottom of the rows
 * @property {number} height
 * @property {Tracks} tracks
 * @property {readonly (Items | null)[]} open of each track, items that have not ended
 * @property {readonly string[]} units names by number
 * @property {readonly Hold[]} holds
 * @property {number | null} cursor
 * @property {number} selected row; -1: none
 * @property {FoundItem | null} hovered
 */

export class Painter {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = penOf(canvas);
    this.look = new Look();
    this.ratio = 1; // pixels of the screen for one of the page
    this.isDark = false;
    this.skin = LIGHT;
    this.lines = new PixelLines();
  }

  /**
   * The widths of the legend's entries.
   * @param {string} text
   */
  widthInLegend(text) {
    this.pen.font = `12px ${FONT}`;
    return this.pen.measureText(text).width;
  }

  /**
   * Take the size of the screen's pixels and the page's theme, and clear the canvas.
   * @param {number} width
   * @param {number} height
   */
  begin(width, height) {
    const { canvas, pen } = this, ratio = window.devicePixelRatio || 1;
    const wide = Math.round(width * ratio), high = Math.round(height * ratio);
    if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
    this.ratio = ratio;
    this.isDark = isDark();
    this.skin = this.isDark ? DARK : LIGHT;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
  }

  /**
   * Draw a sentence in place of a timeline.
   * @param {string} sentence
   * @param {number} width
   * @param {number} height
   */
  drawSentence(sentence, width, height) {
    const { pen } = this;
    pen.font = `14px ${FONT}`;
    Object.assign(pen, { fillStyle: this.skin.soft, textAlign: "center", textBaseline: "middle" });
    pen.fillText(sentence, width / 2, height / 2);
  }

  /** @param {Picture} picture */
  draw(picture) {
    this.drawRows(picture);
    this.drawAxis(picture);
    this.clipped(picture, () => {
      drawItems(this, picture);
      drawHovered(this, picture);
    });
    this.drawHolds(picture);
    this.drawCursor(picture);
    this.drawLabels(picture);
    this.drawLegend(picture);
  }

  /**
   * @param {Picture} picture
   * @param {() => void} action
   */
  clipped({ axis, bottom }, action) {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(axis.left, AXIS_HEIGHT, axis.width, bottom - AXIS_HEIGHT);
    pen.clip();
    action();
    pen.restore();
  }

  /** @param {Picture} picture */
  drawRows({ rows, axis, width, selected }) {
    const { pen, skin } = this;
    rows.forEach(({ y, height }, k) => {
      pen.fillStyle = skin.row;
      pen.fillRect(axis.left, y, axis.width, height);
      if (k !== selected) return;
      pen.fillStyle = skin.selected;
      pen.fillRect(0, y, width, height);
    });
  }

  /** @param {Picture} picture */
  drawAxis({ axis, cursor, bottom, width }) {
    const { pen, skin } = this;
    const flag = this.flag(axis, cursor, width) ?? { left: Infinity, width: 0 };
    pen.font = `11px ${FONT}`;
    const clear = Math.max(axis.left - 8, pen.measureText(inView(axis)).width + 12);
    Object.assign(pen, { textAlign: "center", textBaseline: "middle" });
    for (const { t, text } of axis.ticks()) {
      const x = Math.round(axis.x(t)) + 0.5 / this.ratio;
      pen.fillStyle = skin.grid;
      pen.fillRect(x, AXIS_HEIGHT - 4, 1, bottom - AXIS_HEIGHT + 4);
      pen.fillStyle = skin.soft;
      const half = pen.measureText(text).width / 2;
      const isFree = x + half + 4 < flag.left || x - half - 4 > flag.left + flag.width;
      if (isFree && x - half >= clear && x + half <= width) pen.fillText(text, x, 14);
    }
  }

  /**
   * The label with the cursor's time, above it; null if it is not in view.
   * @param {Axis} axis
   * @param {number | null} cursor
   * @param {number} most width of the canvas
   */
  flag(axis, cursor, most) {
    if (cursor === null || !axis.shows(cursor)) return null;
    const { pen } = this, text = cursorTime(cursor, axis.span), x = axis.x(cursor);
    pen.font = `600 11px ${FONT}`;
    const width = pen.measureText(text).width + 12;
    return { text, x, width, left: Math.min(Math.max(x - width / 2, axis.left), most - width) };
  }

  /**
   * Draw a thin line, with a mark of two bars in the axis, where ranks were held or idle.
   * @param {Picture} picture
   */
  drawHolds({ holds, axis, bottom }) {
    const { pen } = this;
    pen.fillStyle = this.skin.ink;
    for (const [at] of holds) {
      if (!axis.shows(at)) continue;
      const x = Math.round(axis.x(at));
      for (let y = AXIS_HEIGHT; y < bottom; y += 5) pen.fillRect(x, y, 1, 3);
      for (const side of [-3, 2]) pen.fillRect(x + side, AXIS_HEIGHT - 9, 2, 7);
    }
  }

  /** @param {Picture} picture */
  drawCursor({ axis, cursor, bottom, width }) {
    const flag = this.flag(axis, cursor, width);
    if (!flag) return;
    const { pen } = this;
    pen.fillStyle = this.skin.accent;
    pen.fillRect(Math.round(flag.x) - 0.75, AXIS_HEIGHT - 7, 1.5, bottom - AXIS_HEIGHT + 7);
    pen.beginPath();
    pen.roundRect(flag.left, 5, flag.width, 18, 4);
    pen.fill();
    Object.assign(pen, { fillStyle: this.skin.onAccent, textAlign: "center", textBaseline: "middle" });
    pen.fillText(flag.text, flag.left + flag.width / 2, 14.5);
  }

  /** @param {Picture} picture */
  drawLabels({ rows, axis }) {
    const { pen } = this;
    pen.textBaseline = "middle";
    /** @type {number | null} */
    let before = null;
    for (const { track, name, y, height } of rows) {
      const size = Math.min(12, height);
      pen.font = `${size}px ${FONT}`;
      Object.assign(pen, { textAlign: "right", fillStyle: this.skin.soft });
      pen.fillText(name, axis.left - 10, y + height / 2 + 0.5);
      if (track.rank !== before) {
        pen.font = `600 ${size}px ${FONT}`;
        Object.assign(pen, { textAlign: "left", fillStyle: this.skin.ink });
        const text = axis.left < 120 ? `${track.rank}` : shorten(track.label, 10);
        pen.fillText(text, 4, y + height / 2 + 0.5);
      }
      before = track.rank;
    }
    pen.font = `11px ${FONT}`;
    Object.assign(pen, { textAlign: "left", fillStyle: this.skin.soft });
    pen.fillText(inView(axis), 4, 14);
  }

  /** @param {Picture} picture */
  drawLegend({ legend }) {
    const { pen } = this;
    pen.font = `12px ${FONT}`;
    Object.assign(pen, { textAlign: "left", textBaseline: "middle" });
    for (const { kind, text, x, y } of legend) {
      pen.fillStyle = this.look.colour(kind);
      pen.beginPath();
      pen.roundRect(x, y + 1, 12, 12, 2);
      pen.fill();
      pen.fillStyle = this.skin.soft;
      pen.fillText(text, x + 18, y + 7.5);
    }
  }
}

/** An image of one line of pixels per row, which is kept between frames. */
export class PixelLines {
  constructor() {
    this.image = document.createElement("canvas");
    this.data = new ImageData(1, 1);
    this.pixels = new Uint32Array(this.data.data.buffer);
  }

  /**
   * Clear the image; returns its pixels, line by line.
   * @param {number} width
   * @param {number} height
   */
  begin(width, height) {
    if (this.data.width !== width || this.data.height !== height) {
      Object.assign(this.image, { width, height });
      this.data = penOf(this.image).createImageData(width, height);
      this.pixels = new Uint32Array(this.data.data.buffer);
    }
    this.pixels.fill(0);
    return this.pixels;
  }

  /** Bring the pixels into the image. */
  end() {
    penOf(this.image).putImageData(this.data, 0, 0);
    return this.image;
  }
}

/**
 * The text at the left of the axis.
 * @param {Axis} axis
 */
function inView({ span }) {
  return `${formatDuration(span)} in view`;
}
