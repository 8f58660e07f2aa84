/** The cell of `%fsdp example`: a model, an optimizer and `train_step`. */
import type { Notebook } from "@jupyterlab/notebook";

import { EXAMPLE } from "./protocol";

/** Insert the example into an empty last cell, or below it, and activate it; if a cell has it, activate that one. */
export function insertExample(notebook: Notebook): void {
  const model = notebook.model;
  if (model === null) return;
  const source = EXAMPLE.trimEnd();
  const present = [...model.cells].findIndex(({ sharedModel }) => sharedModel.getSource() === source);
  const last = model.sharedModel.cells.at(-1);
  const isFree = last?.cell_type === "code" && last.getSource().trim() === "";
  const index = present >= 0 ? present : model.cells.length - (isFree ? 1 : 0);
  if (present < 0 && isFree) last.setSource(source);
  else if (present < 0) model.sharedModel.insertCell(index, { cell_type: "code", source });
  notebook.deselectAll();
  notebook.activeCellIndex = index;
  notebook.mode = "command";
  void notebook.scrollToItem(index);
}
