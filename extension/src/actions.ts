/** The panel's actions as JupyterLab commands: for the palette, shortcuts and context menus. */
import type { JupyterFrontEnd } from "@jupyterlab/application";

import type { Notebooks } from "./notebooks";
import type { Pictures } from "./pictures";
import { type Break, type Command, type State, VIEWS } from "./protocol";
import type { Settings } from "./settings";
import { type Can, can, pathOf } from "./words";

/** A view: drawn, or shown as a table. */
export type ViewWord = keyof typeof VIEWS;

interface Around {
  readonly openPanel: () => void;
  /** Show a section of the panel, and focus its first field. */
  readonly openForm: (section: string) => void;
  readonly stop: () => void;
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
  { id: "fsdp:next", label: "Run to the Next Event", able: "goOn", command: { word: "next" } },
  {
    id: "fsdp:next-collective",
    label: "Run to the Next Collective",
    able: "goOn",
    command: { word: "next", what: "collective" },
  },
  { id: "fsdp:next-unit", label: "Run to the Next Unit", able: "goOn", command: { word: "next", what: "unit" } },
  { id: "fsdp:next-phase", label: "Run to the Next Phase", able: "goOn", command: { word: "next", what: "phase" } },
  { id: "fsdp:continue", label: "Continue", able: "goOn", command: { word: "continue" } },
  { id: "fsdp:abort", label: "Abort", able: "abort", command: { word: "abort" } },
  { id: "fsdp:heal", label: "Replace Ranks That Died", able: "heal", command: { word: "heal" } },
  { id: "fsdp:lint", label: "Lint the Model", able: "lint", command: { word: "lint" } },
  { id: "fsdp:verify", label: "Verify a Step", able: "step", command: { word: "verify" } },
  { id: "fsdp:fault", label: "Inject a Random Fault", able: "step", command: { word: "fault", name: "random" } },
  { id: "fsdp:fault-off", label: "Remove the Fault", able: "step", command: { word: "fault", name: "off" } },
];

/** Reports in a tab beside the views: id, label, command, and whether there is one. */
const REPORTS: readonly (readonly [string, string, Command, (state: State | null) => boolean])[] = [
  ["fsdp:explain", "Explain What Matters Most", { word: "explain" }, (state) => state?.is_recorded === true],
  ["fsdp:where", "Show Where Every Rank Is", { word: "where" }, (state) => state?.cluster.is_running === true],
  ["fsdp:faults", "List the Faults", { word: "faults" }, (state) => state !== null],
  ["fsdp:status", "Show the Status", { word: "status" }, (state) => state !== null],
];

/** The command that draws a view. */
export function viewOf(word: ViewWord): Command {
  return { word };
}

/** Commands that lead to a form of the panel: id, label, and section of the form. */
const FORMS = [
  ["fsdp:export", "Export\u2026", "Record"],
  ["fsdp:open", "Open a Trace\u2026", "Record"],
  ["fsdp:compare", "Compare\u2026", "Record"],
  ["fsdp:shard", "Shard\u2026", "Shard"],
  ["fsdp:run", "Run a Script\u2026", "Script"],
] as const;

/** Add all commands; returns the ids of those that make sense without a context menu. */
export function addActions(
  app: JupyterFrontEnd,
  notebooks: Notebooks,
  pictures: Pictures,
  { openPanel, openForm, stop, settings }: Around,
): readonly string[] {
  const added: string[] = [];
  const add = (id: string, label: string, isEnabled: () => boolean, execute: () => unknown): void => {
    app.commands.addCommand(id, { label: `FSDP: ${label}`, isEnabled, execute });
    added.push(id);
  };
  const isAble = (able: keyof Can): boolean => can(notebooks.model.state, notebooks.model.prepared)[able];
  for (const { id, label, able, command } of ACTIONS) add(id, label, () => isAble(able), () => notebooks.model.do(command));
  add("fsdp:start", "Start Ranks", () => notebooks.current !== null && isAble("start"), () => {
    openPanel();
    const { numRanks: num_ranks, device } = settings();
    return notebooks.start({ word: "start", num_ranks, device });
  });
  add("fsdp:stop", "Stop the Ranks", () => isAble("stop"), stop);
  for (const word of Object.keys(VIEWS) as ViewWord[]) {
    add(`fsdp:view-${word}`, `Show ${word.slice(0, 1).toUpperCase()}${word.slice(1)}`, () => notebooks.model.state?.is_recorded === true, () =>
      pictures.draw(notebooks.model, notebooks.panel, viewOf(word)));
  }
  for (const [id, label, command, exists] of REPORTS) {
    add(id, label, () => exists(notebooks.model.state), () => pictures.draw(notebooks.model, notebooks.panel, command));
  }
  for (const [id, label, section] of FORMS) {
    add(id, label, () => notebooks.model.state !== null, () => { openForm(section); });
  }
  let before = "";
  notebooks.changed.connect(() => {
    const { state, prepared } = notebooks.model;
    const now = JSON.stringify([can(state, prepared), state?.is_recorded, state === null]);
    if (now !== before) app.commands.notifyCommandChanged();
    before = now;
  });
  addUnitActions(app, notebooks, pictures, () => { openForm("Shard"); });
  return added;
}

/** Add the commands of a unit's context menu. */
function addUnitActions(app: JupyterFrontEnd, notebooks: Notebooks, pictures: Pictures, openForm: () => void): void {
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
    execute: () => pictures.draw(notebooks.model, notebooks.panel, { word: "layout", unit: unit() ?? null }),
  });
}
