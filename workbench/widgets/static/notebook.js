// The script of a notebook exported as a page: see workbench/cli/notebook_page.py.

import { drawAnew, followWidth } from "./figures.js";
import { askFirst } from "./guesses.js";

/** @import { Graph, Plotly } from "./figures.js" */

const { Plotly } = /** @type {{ Plotly: Plotly }} */ (/** @type {unknown} */ (window));
for (const graph of /** @type {NodeListOf<Graph>} */ (document.querySelectorAll(".js-plotly-plot"))) {
  if (graph.parentElement) graph.parentElement.style.height = "auto"; // else that of the figure on a wide page
  followWidth(graph, () => drawAnew(Plotly, graph));
}
askFirst();
