/** Dashboards in saved notebooks: saving stores the last picture of each; without its kernel, a notebook shows that. */
import { CodeCell } from "@jupyterlab/cells";
import type { INotebookTracker, Notebook } from "@jupyterlab/notebook";
import type { IOutputModel, IRenderMime } from "@jupyterlab/rendermime";
import type { PartialJSONObject } from "@lumino/coreutils";
import type { Widget } from "@lumino/widgets";

import { stillOf } from "../../workbench/widgets/static/still.js";

const VIEW = "application/vnd.jupyter.widget-view+json";
const TARGET = "jupyter.widget"; // of the comms of widgets
const PICTURE = "text/html";

/** An output that is a widget: where it is drawn, its data, and the widget's id. */
interface WidgetOutput {
  readonly place: Widget;
  readonly model: IOutputModel;
  readonly id: string;
}

/** Store the last pictures of dashboards whenever a notebook is saved, and show those of a notebook that was opened. */
export function keepStills(tracker: INotebookTracker): void {
  tracker.widgetAdded.connect((_tracker, { content, context, sessionContext }) => {
    context.saveState.connect((_context, state) => {
      if (state === "started") for (const output of widgetsIn(content)) store(output);
    });
    void Promise.all([context.ready, sessionContext.ready]).then(async () => {
      const kernel = sessionContext.session?.kernel;
      const reply = kernel ? (await kernel.requestCommInfo({ target_name: TARGET })).content : null;
      const known = reply?.status === "ok" ? reply.comms : {};
      const { dirty } = context.model;
      for (const { model, id } of [...widgetsIn(content)]) if (!(id in known)) showStill(model);
      context.model.dirty = dirty; // what is shown is what was saved
    });
  });
}

function* widgetsIn(notebook: Notebook): Generator<WidgetOutput> {
  for (const cell of notebook.widgets) {
    if (!(cell instanceof CodeCell)) continue;
    const { model, widgets } = cell.outputArea;
    for (const [number, place] of widgets.entries()) {
      const output = model.get(number) as IOutputModel | undefined;
      const id = (output?.data[VIEW] as PartialJSONObject | undefined)?.model_id;
      if (output !== undefined && typeof id === "string") yield { place, model: output, id };
    }
  }
}

/** Store the picture of a dashboard beside its widget, which continues. */
function store({ place, model, id }: WidgetOutput): void {
  const root = place.node.querySelector<HTMLElement>(".fw-dashboard:not(.fw-still)");
  if (root === null) return;
  for (const child of place.children()) if ("renderModel" in child) drawOnce(child as IRenderMime.IRenderer, id);
  model.setData({ data: { ...model.data, [PICTURE]: stillOf(root) } });
}

const kept = new WeakSet<object>(); // renderers

/** Have a renderer keep the widget that it shows: JupyterLab renders an output again when its data change. */
function drawOnce(renderer: IRenderMime.IRenderer, id: string): void {
  if (kept.has(renderer)) return;
  kept.add(renderer);
  const draw = renderer.renderModel.bind(renderer);
  renderer.renderModel = async (model) => {
    if ((model.data[VIEW] as PartialJSONObject | undefined)?.model_id !== id) await draw(model);
  };
}

/** Show the stored picture in the place of a widget that no kernel has. */
function showStill(model: IOutputModel): void {
  const picture = model.data[PICTURE];
  if (typeof picture !== "string" || !picture.includes("fw-still")) return;
  model.setData({ data: Object.fromEntries(Object.entries(model.data).filter(([type]) => type !== VIEW)) });
}
