/** Figures in notebooks: drawn by plotly's renderer, and laid out for their width there. */
import type { IRenderMime, IRenderMimeRegistry } from "@jupyterlab/rendermime";

import { followWidth, type Graph } from "../../workbench/widgets/static/figures.js";

export const FIGURE = "application/vnd.plotly.v1+json";
const PICTURE = "image/png";
const RANK = 2; // of plotly's extension

/** Make figures follow their width; no-op if no renderer draws them. */
export function followWidths(rendermime: IRenderMimeRegistry): void {
  const plotly = rendermime.getFactory(FIGURE);
  if (plotly === undefined) return;
  rendermime.addFactory({ ...plotly, createRenderer: (options) => follow(plotly.createRenderer(options)) }, RANK);
}

function follow(renderer: IRenderMime.IRenderer): IRenderMime.IRenderer {
  const draw = renderer.renderModel.bind(renderer);
  let end: (() => void) | undefined;
  renderer.renderModel = async (model) => {
    await draw(ownFigure(model));
    end ??= followWidth(renderer.node as unknown as Graph, () => {
      renderer.update();
    });
  };
  renderer.disposed.connect(() => end?.());
  return renderer;
}

/**
 * A model with a copy of the figure, whose layout may change while the notebook keeps the original. The picture stored
 * with a figure is not passed on: it has the width and colours of the page where it was drawn.
 */
function ownFigure(model: IRenderMime.IMimeModel): IRenderMime.IMimeModel {
  const { [FIGURE]: given, [PICTURE]: picture, ...others } = model.data;
  return {
    trusted: model.trusted,
    metadata: model.metadata,
    data: { ...others, [FIGURE]: structuredClone(given) },
    setData: ({ data, metadata }) => {
      if (picture !== undefined || data === undefined) return;
      model.setData({ data: { ...data, [FIGURE]: given }, ...(metadata === undefined ? {} : { metadata }) });
    },
  };
}
