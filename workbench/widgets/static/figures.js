// Figures on narrow pages. A figure brings its narrow layouts (workbench/views/responsive.py); here one is chosen.

/** @typedef {{ below: number, layout: Record<string, unknown> }} Narrow a layout for pages narrower than `below` */

/** @typedef {{ least?: number, narrow?: readonly Narrow[], meanings?: Record<string, string> }} Meta */

/** @typedef {{ meta?: Meta } & Record<string, unknown>} Layout */

/** @typedef {{ yref?: string, yanchor?: string, y?: number }} Legend */

/**
 * An element in which plotly has drawn a figure.
 * @typedef {HTMLElement & { layout: Layout, on?: (event: string, call: () => void) => void }} Graph
 */

/**
 * The part of plotly that a page needs.
 * @typedef {object} Plotly
 * @property {(place: HTMLElement, data: object[], layout: object, config: object) => Promise<Graph>} newPlot
 * @property {(graph: Graph) => Promise<unknown>} redraw
 * @property {{ resize: (graph: Graph) => Promise<unknown> }} Plots
 */

/**
 * Keep a figure laid out for the width of its parent, which scrolls where the figure needs more.
 * @param {Graph} graph
 * @param {() => unknown} redraw draws it with its current layout
 * @returns {() => void} stops following
 */
export function followWidth(graph, redraw) {
  explainTerms(graph);
  graph.on?.("plotly_afterplot", () => {
    explainTerms(graph);
    if (fitLegend(graph)) redraw();
  });
  const around = graph.parentElement, { least, narrow } = graph.layout.meta ?? {};
  if (!around || !least || !narrow) return () => undefined;
  graph.style.minWidth = `${least}px`;
  around.style.overflowX = "auto";
  const names = new Set(narrow.flatMap(({ layout }) => Object.keys(layout)));
  const wide = Object.fromEntries([...names].map((name) => [name, structuredClone(graph.layout[name])]));
  /** @type {Narrow["layout"] | undefined} */
  let shown;
  const observer = new ResizeObserver(() => {
    const width = room(around, graph);
    if (width <= 0) return; // not visible
    const found = narrow.findLast(({ below }) => width < below)?.layout;
    if (found === shown) return;
    shown = found;
    Object.assign(graph.layout, structuredClone({ ...wide, ...found }));
    redraw();
  });
  observer.observe(around);
  return () => { observer.disconnect(); };
}

/**
 * End a figure at the legend under its plot: a layout has room for the widest font, and at another width, as beside a
 * scroll bar, the entries take more lines.
 * @param {Graph} graph
 * @returns {boolean} whether its layout has changed
 */
function fitLegend(graph) {
  const { layout } = graph, legend = /** @type {Legend | undefined} */ (layout.legend);
  const margin = /** @type {{ b?: number } | undefined} */ (layout.margin);
  if (legend?.yref !== "container" || legend.yanchor !== "top") return false;
  const box = graph.querySelector(".legend .bg")?.getBoundingClientRect();
  const whole = graph.querySelector(".main-svg")?.getBoundingClientRect();
  if (!box?.height || !whole || margin?.b === undefined) return false;
  const height = typeof layout.height === "number" ? layout.height : whole.height; // plotly forgets it on a resize
  if (Math.abs(whole.height - height) > 1) return false;
  const empty = Math.floor(whole.bottom - box.bottom);
  if (Math.abs(empty) < 2) return false;
  layout.height = height - empty;
  margin.b -= empty;
  legend.y = ((legend.y ?? 0) * height - empty) / (height - empty);
  return true;
}

/**
 * Let legend entries and headings say what they mean when the pointer rests on them.
 * @param {Graph} graph
 */
export function explainTerms(graph) {
  const meanings = graph.layout.meta?.meanings ?? {};
  for (const text of /** @type {NodeListOf<SVGElement>} */ (graph.querySelectorAll("text[data-unformatted]"))) {
    const meaning = meanings[text.dataset.unformatted ?? ""];
    const entry = /** @type {SVGElement} */ (text.closest(".traces") ?? text); // plotly covers the text of a legend
    if (!meaning || entry.querySelector(":scope > title")) continue;
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = meaning;
    entry.append(title);
    if (entry === text) entry.style.pointerEvents = "all";
  }
}

/**
 * Visible width of `around` from the left edge of `inside` on, before any scrolling, in pixels.
 * @param {HTMLElement} around
 * @param {HTMLElement} inside
 */
function room(around, inside) {
  const left = inside.getBoundingClientRect().left - around.getBoundingClientRect().left + around.scrollLeft;
  return around.clientWidth - left - parseFloat(getComputedStyle(around).paddingRight);
}

/**
 * Redraw a figure with the height of its layout, at the width of its element.
 * @param {Plotly} plotly
 * @param {Graph} graph
 */
export async function drawAnew(plotly, graph) {
  const { height } = graph.layout;
  if (typeof height === "number") graph.style.height = `${height}px`; // plotly resizes to the element
  await plotly.redraw(graph);
  await plotly.Plots.resize(graph);
}
