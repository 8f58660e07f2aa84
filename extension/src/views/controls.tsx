/** What steps, stops and goes on; and how it goes, in one line. */
import { closeIcon, fastForwardIcon, pauseIcon, runIcon, stepOverIcon, stopIcon } from "@jupyterlab/ui-components";
import * as React from "react";

import { formatDuration, formatLoss } from "../../../workbench/widgets/static/format.js";
import type { PanelModel, Reply } from "../model";
import type { Command, Next, State } from "../protocol";
import { announcement, count as counted, headline, isTable, obstacles, pageWritten } from "../words";
import { Choice, Text, Tool } from "./parts";

const SIZES = ["event", "collective", "unit", "phase"] as const;

interface ControlsProps {
  readonly model: PanelModel;
  readonly state: State;
  readonly tabulate: (name: string, text: string) => void;
  /** Open a page that the kernel wrote, by its path from the notebook. */
  readonly openPage: (path: string) => void;
}

export function Controls({ model, state, tabulate, openPage }: ControlsProps): React.JSX.Element {
  const [count, setCount] = React.useState("1");
  const [what, setWhat] = React.useState<Next["what"]>("event");
  const why = obstacles(state, model.prepared);
  const head = headline(state, model.isGivingUp);
  const explain = (obstacle: string): void => {
    model.reply = { line: "", text: obstacle, isBad: false };
  };
  const run = (command: Command): void => {
    void model.do(command);
  };
  const steps = Math.max(1, Math.round(Number(count)) || 1);
  const step: Command = { word: "step", ...(steps === 1 ? {} : { count: steps }), background: true };
  return (
    <div className="fsdp-Controls">
      <div className="fsdp-Tools" role="toolbar" aria-label="training">
        <Tool icon={runIcon} label={`Train ${counted(steps, "step")}`} command={step} obstacle={why.step} {...{ run, explain }} />
        <label title="How many steps the button beside it trains">
          <span className="fsdp-unseen">Training steps</span>
          <Text type="number" min={1} value={count} change={setCount} />
        </label>
        <span className="fsdp-gap" />
        <Tool icon={pauseIcon} label="Pause inside the step" command={{ word: "pause" }} obstacle={why.pause} {...{ run, explain }} />
        <Tool icon={fastForwardIcon} label="Continue" command={{ word: "continue" }} obstacle={why.goOn} {...{ run, explain }} />
        <Tool icon={stopIcon} label="Abort" command={{ word: "abort" }} obstacle={why.abort} {...{ run, explain }} />
        <span className="fsdp-gap" />
        <span className="fsdp-Pair">
          <Tool icon={stepOverIcon} label={`Go on to the next ${what}`} command={{ word: "next", what }} obstacle={why.goOn} {...{ run, explain }} />
          <label title="How far the button beside it goes">
            <span className="fsdp-unseen">Size of next</span>
            <Choice
              value={what ?? "event"}
              among={SIZES}
              choose={setWhat}
            />
          </label>
        </span>
      </div>
      <Told {...{ model, tabulate, openPage }} />
      <p className={`fsdp-Headline fsdp-mod-${head.tone}`} title={head.short === undefined ? undefined : head.text}>
        {head.short ?? head.text}
        {head.todo === undefined ? null : <span className="fsdp-Todo">{head.todo}</span>}
      </p>
      <p className="fsdp-unseen" role="status" aria-label="state of the ranks">
        {announcement(state, model.isGivingUp)}
      </p>
      <p className="fsdp-Numbers">
        <Figure name="loss" value={state.training.loss === null ? "" : formatLoss(state.training.loss)} />
        <Figure
          name="step time"
          value={state.training.steps_per_s === null ? "" : formatDuration(1e6 / state.training.steps_per_s)}
        />
        {state.training.tokens_per_s === null ? null : (
          <Figure name="tokens/s" value={Math.round(state.training.tokens_per_s).toLocaleString("en")} />
        )}
        <Figure name="step" value={state.training.step < 0 ? "" : String(state.training.step)} />
      </p>
    </div>
  );
}

/** The newest reply, until the next one or until it is closed. */
export function Told({ model, tabulate, openPage }: Pick<ControlsProps, "model" | "tabulate" | "openPage">): React.JSX.Element | null {
  const { reply } = model;
  if (reply === null) return null;
  const { line, text, isBad } = reply;
  const page = isBad ? null : pageWritten(text);
  return (
    <div className={`fsdp-Reply${isBad ? " fsdp-mod-bad" : ""}`} role={isBad ? "alert" : "status"} aria-label="reply">
      <button type="button" className="fsdp-Tool" title="Close" aria-label="Close the reply" onClick={() => { model.reply = null; }}>
        <closeIcon.react tag="span" width="14px" />
      </button>
      {line === "" ? null : <code title={line}>{line}</code>}
      <pre className={isTable(text) ? "fsdp-mod-table" : ""} tabIndex={0} role="region" aria-label="text of the reply">
        {text || "done"}
      </pre>
      {isLong(reply) ? (
        <button type="button" className="fsdp-Link" onClick={() => { tabulate(nameOf(line), text); }}>
          Show in a tab
        </button>
      ) : null}
      {page === null ? null : (
        <button type="button" className="fsdp-Link" onClick={() => { openPage(page); }}>
          Open the page
        </button>
      )}
    </div>
  );
}

/** Lines that the panel has room for. */
const FEW_LINES = 8;

function isLong({ text }: Reply): boolean {
  return isTable(text) || text.split("\n").length > FEW_LINES;
}

/** `%fsdp start -n 4` as `start`. */
function nameOf(line: string): string {
  return line.split(" ")[1] ?? "reply";
}

function Figure({ name, value }: { readonly name: string; readonly value: string }): React.JSX.Element {
  return (
    <span>
      <small>{name}</small> <b>{value || "\u2013"}</b>
    </span>
  );
}
