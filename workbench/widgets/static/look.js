// Colours: of kinds, and whether the page is dark.

import { KIND, KINDS } from "./events.js";

function rgb(hex) {
  return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}

/** The colour of each kind; that of a wait means exposed. */
export function makeLook() {
  const look = { red: new Uint8Array(256), green: new Uint8Array(256), blue: new Uint8Array(256) };
  KINDS.forEach(({ colour }, kind) => ([look.red[kind], look.green[kind], look.blue[kind]] = rgb(colour)));
  look.exposedCss = KINDS[KIND.WAIT].colour;
  look.exposed = rgb(look.exposedCss);
  look.colour = (kind) => KINDS[kind].colour;
  look.textOn = (kind) =>
    look.red[kind] * 0.299 + look.green[kind] * 0.587 + look.blue[kind] * 0.114 > 140 ? "#10151b" : "#ffffff";
  return look;
}

/** Whether JupyterLab has a dark theme, or without one the system. */
export function isDark() {
  const lab = document.body?.dataset.jpThemeLight;
  return lab === undefined ? matchMedia("(prefers-color-scheme: dark)").matches : lab === "false";
}
