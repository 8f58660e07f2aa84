// Figures on narrow pages. What is other there is written in the figure (workbench/views/responsive.py), here it is chosen.

/** @typedef {{ below: number, layout: Record<string, unknown> }} Narrow a layout for pages that are narrower than that */

/** @typedef {{ meta?: { least?: number, narrow?: readonly Narrow[] } } & Record<string, unknown>} Layout */

/** @typedef {HTMLElement & { layout: Layout }} Graph an element in which plotly has drawn a figure */

/**
 * What a page needs of plotly.
 * @typedef {object} Plotly
 * @property {(place: HTMLElement, data: object[], layout: object, config: object) => Promise<Graph>} newPlot
 * @property {(graph: Graph) => Promise<unknown>} redraw
 * @property {{ resize: (graph: Graph) => Promise<unknown> }} Plots
 */

/**
 * Keep a figure laid out for the width of the element around it, which scrolls where the figure needs more.
 * @param {Graph} graph
 * @param {() => unknown} redraw draws it as its layout is then
 * @returns {() => void} ends it
 */
export function followWidth(graph, redraw) {
  const around = graph.parentElement, { least, narrow } = graph.layout.meta ?? {};
  if (!around || !least || !narrow) return () => undefined;
  graph.style.minWidth = `${least}px`;
  around.style.overflowX = "auto";
  const names = new Set(narrow.flatMap(({ layout }) => Object.keys(layout)));
  const wide = Object.fromEntries([...names].map((name) => [name, structuredClone(graph.layout[name])]));
  let shown = wide;
  const observer = new ResizeObserver(() => {
    const width = room(around, graph);
    if (width <= 0) return; // nobody sees it
    const found = narrow.findLast(({ below }) => width < below)?.layout ?? wide;
    if (found === shown) return;
    shown = found;
    Object.assign(graph.layout, structuredClone(found));
    redraw();
  });
  observer.observe(around);
  return () => { observer.disconnect(); };
}

/**
 * How many pixels of an element are seen from the left edge of another one in it on, before anything is scrolled.
 * @param {HTMLElement} around
 * @param {HTMLElement} inside
 */
function room(around, inside) {
  const left = inside.getBoundingClientRect().left - around.getBoundingClientRect().left + around.scrollLeft;
  return around.clientWidth - left - parseFloat(getComputedStyle(around).paddingRight);
}

/**
 * Draw a figure anew, as wide as its element is.
 * @param {Plotly} plotly
 * @param {Graph} graph
 */
export async function drawAnew(plotly, graph) {
  await plotly.redraw(graph);
  await plotly.Plots.resize(graph);
}
