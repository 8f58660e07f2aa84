// The script of a page that holds a record: the dashboard over it, and figures below. workbench/widgets/trace_page.py
// writes the page. It needs neither a kernel nor a network.

import { showDashboard } from "./dashboard.js";
import { drawAnew, followWidth } from "./figures.js";
import { channelTo } from "./record/kernel.js";
import { RecordedRun, unzipped } from "./record/recorded_run.js";

/** @import { Plotly } from "./figures.js" */

/** @typedef {{ data: object[], layout: object, frames?: object[] }} Figure */

/** @typedef {{ figures: Record<string, Figure> }} Figures */

/** @param {string} id */
function element(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page lacks ${id}`);
  return found;
}

async function show() {
  const run = new RecordedRun(await unzipped(element("record").textContent));
  showDashboard({ model: channelTo(run), el: element("dashboard") });
  Object.assign(window, { run }); // for inspection in the page
  const { figures } = /** @type {Figures} */ (/** @type {unknown} */ (run.told));
  const { Plotly } = /** @type {{ Plotly: Plotly }} */ (/** @type {unknown} */ (window));
  for (const [name, { data, layout }] of Object.entries(figures)) {
    const config = { displayModeBar: false, responsive: true };
    const graph = await Plotly.newPlot(element(name), data, { ...layout, autosize: true }, config);
    followWidth(graph, () => drawAnew(Plotly, graph));
  }
}

show().catch((/** @type {unknown} */ error) => {
  element("dashboard").textContent = `The record cannot be shown: ${String(error)}. It needs a browser from 2023 or later.`;
});
