// Shared by all drawing: the pen, the font, the colours of kinds, and whether the page is dark.

import { KIND, KINDS } from "./events.js";
import { sure } from "./sure.js";

export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif";

/** @param {HTMLCanvasElement} canvas */
export function penOf(canvas) {
  const pen = canvas.getContext("2d");
  if (!pen) throw new Error("this browser does not support canvas");
  return pen;
}

/**
 * @param {string} hex
 * @returns {[number, number, number]}
 */
function rgb(hex) {
  const part = (/** @type {number} */ at) => Number.parseInt(hex.slice(at, at + 2), 16);
  return [part(1), part(3), part(5)];
}

/** The colour of each kind; that of a wait means exposed. */
export class Look {
  constructor() {
    this.red = new Uint8Array(256);
    this.green = new Uint8Array(256);
    this.blue = new Uint8Array(256);
    KINDS.forEach(({ colour }, kind) => ([this.red[kind], this.green[kind], this.blue[kind]] = rgb(colour)));
    this.exposedCss = KINDS[KIND.WAIT].colour;
    this.exposed = rgb(this.exposedCss);
  }

  /** @param {number} kind */
  colour(kind) {
    return sure(KINDS[kind]).colour;
  }

  /**
   * A text colour that is readable on that of `kind`.
   * @param {number} kind
   */
  textOn(kind) {
    const red = sure(this.red[kind]), green = sure(this.green[kind]), blue = sure(this.blue[kind]);
    return red * 0.299 + green * 0.587 + blue * 0.114 > 140 ? "#10151b" : "#ffffff";
  }
}

/** Whether JupyterLab's theme is dark; without JupyterLab, the system's. */
export function isDark() {
  const lab = document.body.dataset.jpThemeLight;
  return lab === undefined ? matchMedia("(prefers-color-scheme: dark)").matches : lab === "false";
}
