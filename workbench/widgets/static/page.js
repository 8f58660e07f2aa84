// The program of a page that holds a record: the dashboard over it, and figures below. The page is written by
// workbench/widgets/page.py. Nothing is asked of anybody.

import { showDashboard } from "./dashboard.js";
import { isDark } from "./look.js";
import { RecordedRun, modelOf, unzipped } from "./recorded.js";

/** @typedef {{ data: object[], layout: object, frames?: object[] }} Figure */

/** @typedef {{ react: (place: HTMLElement, data: object[], layout: object, config: object) => Promise<unknown> }} Plotly */

/** @typedef {{ figures: Record<string, Figure>, ink: string }} Figures `ink`: the colour of their text and lines */

/** @param {string} id */
function element(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page lacks ${id}`);
  return found;
}

async function show() {
  const run = new RecordedRun(await unzipped(element("record").textContent));
  showDashboard({ model: modelOf(run), el: element("dashboard") });
  Object.assign(window, { run }); // for whoever looks into the page
  const { figures, ink } = /** @type {Figures} */ (/** @type {unknown} */ (run.told));
  const draw = () => drawFigures(figures, ink);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { void draw(); });
  await draw();
}

/**
 * Draw the figures in the colours of the page, which may have become dark or light.
 * @param {Record<string, Figure>} figures
 * @param {string} ink
 */
async function drawFigures(figures, ink) {
  const { Plotly } = /** @type {{ Plotly: Plotly }} */ (/** @type {unknown} */ (window));
  const box = element("figures");
  box.classList.toggle("fw-dark", isDark());
  const { color } = getComputedStyle(box);
  for (const [name, figure] of Object.entries(figures)) {
    const { data, layout } = inked(figure, ink, color);
    await Plotly.react(element(name), data, { ...layout, autosize: true }, { displayModeBar: false, responsive: true });
  }
}

/**
 * A figure with another ink.
 * @param {Figure} figure
 * @param {string} ink
 * @param {string} other
 */
function inked(figure, ink, other) {
  const change = (/** @type {string} */ _name, /** @type {unknown} */ value) => (value === ink ? other : value);
  /** @type {unknown} */
  const found = JSON.parse(JSON.stringify(figure), change);
  return /** @type {Figure} */ (found);
}

show().catch((/** @type {unknown} */ error) => {
  element("dashboard").textContent = `The record cannot be shown: ${String(error)}. It takes a browser of 2023 or newer.`;
});
