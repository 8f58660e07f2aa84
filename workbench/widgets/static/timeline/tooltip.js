// The tip beside the pointer.

import { make } from "../dom.js";
import { FONT } from "../look.js";

/** @import { TimelineSkin } from "./painter.js" */

export class Tooltip {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {HTMLElement} parent
   */
  constructor(canvas, parent) {
    this.canvas = canvas;
    this.box = make("div");
    this.box.setAttribute("role", "tooltip");
    Object.assign(this.box.style, { position: "absolute", display: "none", pointerEvents: "none", zIndex: 10,
      padding: "6px 9px", borderRadius: "5px", font: `12px/1.45 ${FONT}`, width: "max-content", maxWidth: "min(340px, 100%)",
      boxSizing: "border-box", overflowWrap: "anywhere", boxShadow: "0 2px 10px rgba(0,0,0,0.22)" });
    parent.append(this.box);
  }

  /**
   * Show lines, the first of them bold, beside a point of the canvas.
   * @param {readonly string[]} lines
   * @param {number} x
   * @param {number} y
   */
  show(lines, x, y) {
    const { box, canvas } = this;
    box.replaceChildren(...lines.map((line, k) => {
      const div = make("div", "", line);
      if (!k) div.style.fontWeight = "600";
      return div;
    }));
    box.style.display = "block";
    const around = canvas.getBoundingClientRect();
    const left = x + 16 + box.offsetWidth > around.width ? x - 16 - box.offsetWidth : x + 16;
    const top = Math.min(y + 14, Math.max(around.height - box.offsetHeight - 4, 0));
    box.style.left = `${canvas.offsetLeft + Math.max(left, 0)}px`;
    box.style.top = `${canvas.offsetTop + top}px`;
  }

  hide() {
    this.box.style.display = "none";
  }

  /** @param {TimelineSkin} skin */
  dress({ tip, ink, tipEdge }) {
    Object.assign(this.box.style, { background: tip, color: ink, border: `1px solid ${tipEdge}` });
  }

  remove() {
    this.box.remove();
  }
}
