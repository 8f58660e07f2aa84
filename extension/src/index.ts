/** What JupyterLab loads: the commands, and where they are found. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from "@jupyterlab/application";
import { ICommandPalette } from "@jupyterlab/apputils";
import { INotebookTracker } from "@jupyterlab/notebook";

import { shardsIcon } from "./icon";
import { insertLoad, LOAD } from "./load";

const plugin: JupyterFrontEndPlugin<void> = {
  id: "fsdp-workbench:plugin",
  description: "Starts ranks, shards, steps, stops and looks, beside the notebook.",
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ICommandPalette],
  activate: (app: JupyterFrontEnd, notebooks: INotebookTracker, palette: ICommandPalette | null) => {
    app.commands.addCommand("fsdp:load", {
      label: `Insert ${LOAD}`,
      caption: `Put a cell with ${LOAD} into this notebook`,
      icon: shardsIcon,
      isEnabled: () => notebooks.currentWidget !== null,
      execute: () => {
        if (notebooks.currentWidget !== null) insertLoad(notebooks.currentWidget.content);
      },
    });
    palette?.addItem({ command: "fsdp:load", category: "FSDP" });
  },
};

export default plugin;
