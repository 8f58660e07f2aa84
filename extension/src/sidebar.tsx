/** The panel in the sidebar, and the line in the status bar. */
import type { JupyterFrontEnd } from "@jupyterlab/application";
import { Clipboard, Dialog, ReactWidget, showDialog } from "@jupyterlab/apputils";
import type { IStateDB } from "@jupyterlab/statedb";
import { UseSignal } from "@jupyterlab/ui-components";
import type { Message } from "@lumino/messaging";
import * as React from "react";

import { FocusKeeper } from "./focus";
import { shardsIcon } from "./icon";
import type { PanelModel } from "./model";
import type { Notebooks } from "./notebooks";
import type { Settings } from "./settings";
import type { Pictures } from "./pictures";
import { Panel } from "./views/panel";
import { statusLine } from "./words";

const FOLDED = "fsdp-workbench:folded";

export class Sidebar extends ReactWidget {
  readonly #notebooks: Notebooks;
  readonly #pictures: Pictures;
  readonly #commands: JupyterFrontEnd["commands"];
  readonly #stored: IStateDB | null;
  readonly #focus: FocusKeeper;
  #settings: Settings;
  #folded: ReadonlySet<string> = new Set();

  constructor(notebooks: Notebooks, pictures: Pictures, commands: JupyterFrontEnd["commands"], settings: Settings, stored: IStateDB | null) {
    super();
    this.#notebooks = notebooks;
    this.#pictures = pictures;
    this.#commands = commands;
    this.#settings = settings;
    this.#stored = stored;
    this.id = "fsdp-workbench-panel";
    this.addClass("fsdp-Panel");
    this.title.icon = shardsIcon;
    this.title.caption = "FSDP";
    this.node.tabIndex = -1; // opened by keyboard it has the focus, and Tab continues from its beginning
    this.node.setAttribute("role", "region");
    this.node.setAttribute("aria-label", "FSDP");
    this.#focus = new FocusKeeper(this.node);
    void this.#restore();
  }

  override dispose(): void {
    this.#focus.dispose();
    super.dispose();
  }

  set settings(settings: Settings) {
    this.#settings = settings;
    this.update();
  }

  /** Show a section, unfold it if needed, and focus its first field. */
  reveal(name: string): void {
    if (this.#folded.has(name)) this.#toggle(name);
    requestAnimationFrame(() => {
      const section = this.node.querySelector(`.fsdp-Section[aria-label="${CSS.escape(name)}"]`);
      section?.scrollIntoView({ block: "nearest" });
      section?.querySelector<HTMLElement>(".fsdp-Section-body :is(input, select)")?.focus();
    });
  }

  /** Stop the ranks, after confirmation if they are at work. */
  stop(): void {
    void stopRanks(this.#notebooks.model);
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    this.node.scrollTop = 0;
    this.node.focus();
  }

  protected override render(): React.JSX.Element {
    return <UseSignal signal={this.#notebooks.changed}>{() => this.#panel()}</UseSignal>;
  }

  #panel(): React.JSX.Element {
    const notebooks = this.#notebooks, { panel, model, current } = notebooks;
    return (
      <Panel
        key={panel?.id ?? ""}
        model={model}
        notebook={panel?.title.label ?? ""}
        settings={this.#settings}
        folding={{ folded: this.#folded, toggle: this.#toggle }}
        start={async (command) => notebooks.start(command)}
        load={() => void current?.load()}
        reconnect={() => current?.reconnect()}
        stop={() => { this.stop(); }}
        draw={(command) => void this.#pictures.draw(model, panel, command)}
        tabulate={(name, text) => void this.#pictures.show(panel, name, { "text/plain": text })}
        openPage={(path) => void this.#pictures.openPage(model, panel, path)}
        execute={(command) => void this.#commands.execute(command)}
        show={(name) => { this.reveal(name); }}
        copy={(line) => {
          Clipboard.copyToSystem(line);
        }}
      />
    );
  }

  readonly #toggle = (name: string): void => {
    const folded = new Set(this.#folded);
    if (!folded.delete(name)) folded.add(name);
    this.#folded = folded;
    void this.#stored?.save(FOLDED, [...folded]);
    this.update();
  };

  async #restore(): Promise<void> {
    const names = await this.#stored?.fetch(FOLDED);
    if (!Array.isArray(names)) return;
    this.#folded = new Set(names.map(String));
    this.update();
  }
}

/** Stop the ranks, after confirmation if they are at work. */
async function stopRanks(model: PanelModel): Promise<void> {
  const line = model.state?.request?.line;
  if (line !== undefined) {
    const { button } = await showDialog({
      title: "Stop the ranks?",
      body: `They are running ${line}. The trace is kept.`,
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: "Stop" })],
    });
    if (!button.accept) return;
  }
  await model.do({ word: "stop" });
}

/** Number of ranks, loss, steps per second, or where they are stopped; red if one is dead. A click shows the panel. */
export class StatusItem extends ReactWidget {
  readonly #notebooks: Notebooks;
  readonly #open: () => void;

  constructor(notebooks: Notebooks, open: () => void) {
    super();
    this.#notebooks = notebooks;
    this.#open = open;
    this.addClass("fsdp-Status");
    this.addClass("jp-mod-highlighted");
  }

  protected override render(): React.JSX.Element {
    return (
      <UseSignal signal={this.#notebooks.changed}>
        {() => {
          const { standing, state } = this.#notebooks.model;
          const line = statusLine(standing, state);
          return line === null ? <></> : (
            <button type="button" className={`fsdp-mod-${line.tone}`} title={line.text} onClick={this.#open}>
              {line.text}
            </button>
          );
        }}
      </UseSignal>
    );
  }
}
