/** The panel in the sidebar, and the line in the status bar. */
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
import { Panel } from "./views/panel";
import { statusLine } from "./words";

const FOLDED = "fsdp-workbench:folded";

export class Sidebar extends ReactWidget {
  readonly #notebooks: Notebooks;
  readonly #stored: IStateDB | null;
  readonly #focus: FocusKeeper;
  #settings: Settings;
  #folded: ReadonlySet<string> = new Set();

  constructor(notebooks: Notebooks, settings: Settings, stored: IStateDB | null) {
    super();
    this.#notebooks = notebooks;
    this.#settings = settings;
    this.#stored = stored;
    this.id = "fsdp-workbench-panel";
    this.addClass("fsdp-Panel");
    this.title.icon = shardsIcon;
    this.title.caption = "FSDP";
    this.node.tabIndex = -1; // whoever opens it by keyboard is in it: Tab goes on from its beginning
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

  /** Have a section shown that may be folded. */
  unfold(name: string): void {
    if (this.#folded.has(name)) this.#toggle(name);
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    if (!this.node.contains(document.activeElement)) this.node.focus();
  }

  protected override render(): React.JSX.Element {
    return <UseSignal signal={this.#notebooks.changed}>{() => this.#panel()}</UseSignal>;
  }

  #panel(): React.JSX.Element {
    const { panel, model, current } = this.#notebooks;
    return (
      <Panel
        key={panel?.id ?? ""}
        model={model}
        notebook={panel?.title.label ?? ""}
        settings={this.#settings}
        folding={{ folded: this.#folded, toggle: this.#toggle }}
        start={async (command) => current?.start(command)}
        load={() => void current?.load()}
        reconnect={() => current?.reconnect()}
        stop={() => void stopRanks(model)}
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

/** Stop the ranks; while they do something, only if that is meant. */
async function stopRanks(model: PanelModel): Promise<void> {
  const line = model.state?.request?.line;
  if (line !== undefined) {
    const { button } = await showDialog({
      title: "Stop the ranks?",
      body: `They are in the middle of ${line}. What was recorded stays.`,
      buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: "Stop" })],
    });
    if (!button.accept) return;
  }
  await model.do({ word: "stop" });
}

/** Ranks alive, loss, steps a second, or where they stand; red when a rank is dead. A click shows the panel. */
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
