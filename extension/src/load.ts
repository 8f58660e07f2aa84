/** The line that enables `%fsdp` in a notebook: inserted into a cell, never run unasked. */
import type { Notebook } from "@jupyterlab/notebook";

export const LOAD = "%load_ext workbench";

/** Insert a cell with the line above the active one and activate it; if a cell has the line, activate that one. */
export function insertLoad(notebook: Notebook): void {
  const model = notebook.model;
  if (model === null) return;
  const present = [...model.cells].findIndex(
    ({ type, sharedModel }) => type === "code" && sharedModel.getSource().split("\n").some((line) => line.trim() === LOAD),
  );
  const index = present >= 0 ? present : Math.max(notebook.activeCellIndex, 0);
  if (present < 0) model.sharedModel.insertCell(index, { cell_type: "code", source: LOAD });
  notebook.deselectAll();
  notebook.activeCellIndex = index;
}
