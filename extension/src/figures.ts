/** Figures in notebooks: drawn by plotly's renderer, and laid out for the width that they have there. */
import type { IRenderMime, IRenderMimeRegistry } from "@jupyterlab/rendermime";

import { followWidth, type Graph } from "../../workbench/widgets/static/figures.js";

const FIGURE = "application/vnd.plotly.v1+json";
const PICTURE = "image/png";
const RANK = 2; // that plotly's extension has

/** Have figures follow their width; where nothing draws them, nothing is changed. */
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
 * A model with a figure of its own, for its layout changes, and a notebook keeps the one that it was given. Nor is the
 * picture told that is kept beside a figure: it has the width and the colours of the page on which it was drawn.
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
