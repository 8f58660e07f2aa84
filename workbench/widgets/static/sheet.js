// A canvas that is as wide as its parent, sharp on any screen.

import { FONT, penOf } from "./look.js";

/** @typedef {CanvasRenderingContext2D} Pen */

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
