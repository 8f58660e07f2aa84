/** The commands of training as commands of JupyterLab: for the palette, shortcuts and context menus. */
import type { JupyterFrontEnd } from "@jupyterlab/application";
import { MainAreaWidget } from "@jupyterlab/apputils";
import { type IRenderMimeRegistry, MimeModel } from "@jupyterlab/rendermime";
import type { PartialJSONObject } from "@lumino/coreutils";
import { Panel } from "@lumino/widgets";

import { shardsIcon } from "./icon";
import type { PanelModel } from "./model";
import type { Notebooks } from "./notebooks";
import type { Break, Command } from "./protocol";
import type { Settings } from "./settings";
import { type Can, can, pathOf } from "./words";

interface Around {
  readonly openPanel: () => void;
  /** Show the form that shards. */
  readonly openForm: () => void;
  readonly settings: () => Settings;
}

interface Action {
  readonly id: string;
  readonly label: string;
  readonly able: keyof Can;
  readonly command: Command;
}

const ACTIONS: readonly Action[] = [
  { id: "fsdp:step", label: "Train One Step", able: "step", command: { word: "step", background: true } },
  { id: "fsdp:pause", label: "Pause Inside the Step", able: "pause", command: { word: "pause" } },
  { id: "fsdp:next", label: "Go On to the Next Event", able: "goOn", command: { word: "next" } },
  {
    id: "fsdp:next-collective",
    label: "Go On to the Next Collective",
    able: "goOn",
    command: { word: "next", what: "collective" },
  },
  { id: "fsdp:next-unit", label: "Go On to the Next Unit", able: "goOn", command: { word: "next", what: "unit" } },
  { id: "fsdp:next-phase", label: "Go On to the Next Phase", able: "goOn", command: { word: "next", what: "phase" } },
  { id: "fsdp:continue", label: "Continue", able: "goOn", command: { word: "continue" } },
  { id: "fsdp:abort", label: "Abort", able: "abort", command: { word: "abort" } },
];

/** Add them; returns those that make sense without a menu. */
export function addActions(
  app: JupyterFrontEnd,
  notebooks: Notebooks,
  rendermime: IRenderMimeRegistry,
  { openPanel, openForm, settings }: Around,
): readonly string[] {
  for (const { id, label, able, command } of ACTIONS) {
    app.commands.addCommand(id, {
      label,
      isEnabled: () => can(notebooks.model.state)[able],
      execute: () => notebooks.model.do(command),
    });
  }
  app.commands.addCommand("fsdp:start", {
    label: "Start Ranks",
    isEnabled: () => notebooks.current !== null && can(notebooks.model.state).start,
    execute: () => {
      openPanel();
      const { numRanks: num_ranks, device } = settings();
      return notebooks.current?.start({ word: "start", num_ranks, device });
    },
  });
  let before = "";
  notebooks.changed.connect(() => {
    const now = JSON.stringify(can(notebooks.model.state));
    if (now !== before) app.commands.notifyCommandChanged();
    before = now;
  });
  addUnitActions(app, notebooks, rendermime, openForm);
  return [...ACTIONS.map(({ id }) => id), "fsdp:start"];
}

/** What the context menu of a unit does. */
function addUnitActions(
  app: JupyterFrontEnd,
  notebooks: Notebooks,
  rendermime: IRenderMimeRegistry,
  openForm: () => void,
): void {
  const unit = (): string | undefined =>
    app.contextMenuHitTest(({ dataset }) => dataset.fsdpUnit !== undefined)?.dataset.fsdpUnit;
  const breaks = [
    ["fsdp:break-all-gather", "Break before Its All-Gather", "all_gather"],
    ["fsdp:break-forward", "Break before Its Forward", "forward"],
    ["fsdp:break-backward", "Break before Its Backward", "backward"],
  ] as const;
  for (const [id, label, kind] of breaks) {
    app.commands.addCommand(id, {
      label,
      execute: () => {
        const command: Break = { word: "break", action: "add", event: `${kind}:${unit()}` };
        return notebooks.model.do(command);
      },
    });
  }
  const path = (): string | null => {
    const { units, models } = notebooks.model;
    const index = app.contextMenuHitTest(({ dataset }) => dataset.fsdpIndex !== undefined)?.dataset.fsdpIndex;
    const found = units.find((each) => String(each.index) === index);
    return found === undefined ? null : pathOf(found, models);
  };
  app.commands.addCommand("fsdp:reshard", {
    label: "Reshard This\u2026",
    isEnabled: () => path() !== null,
    execute: () => {
      const found = path();
      if (found === null) return;
      openForm();
      notebooks.model.askFor(found);
    },
  });
  app.commands.addCommand("fsdp:show-layout", {
    label: "Show in Layout",
    execute: () => draw(app, notebooks.model, rendermime, { word: "layout", unit: unit() ?? null }),
  });
}

/** Do a command that draws, and show the picture in a tab. */
async function draw(
  app: JupyterFrontEnd,
  model: PanelModel,
  rendermime: IRenderMimeRegistry,
  command: Command,
): Promise<void> {
  const data = await model.show(command);
  const type = data === null ? undefined : rendermime.preferredMimeType(data as PartialJSONObject, "any");
  if (data === null || type === undefined) return;
  const picture = rendermime.createRenderer(type);
  const content = new Panel(); // which scrolls where the picture is larger than the tab
  content.addClass("fsdp-Picture");
  content.addWidget(picture);
  const widget = new MainAreaWidget({ content });
  widget.title.label = `FSDP: ${command.word}`;
  widget.title.icon = shardsIcon;
  widget.title.closable = true;
  app.shell.add(widget, "main");
  await picture.renderModel(new MimeModel({ data: data as PartialJSONObject }));
}
