/** What steps, stops and goes on; and how it goes, in one line. */
import { fastForwardIcon, pauseIcon, runIcon, stepOverIcon, stopIcon } from "@jupyterlab/ui-components";
import * as React from "react";

import { formatDuration, formatLoss } from "../../../workbench/widgets/static/format.js";
import type { PanelModel } from "../model";
import type { Command, Next, State } from "../protocol";
import { announcement, can, headline } from "../words";
import { Choice, Text, Tool } from "./parts";

const SIZES = ["event", "collective", "unit", "phase"] as const;

export function Controls({ model, state }: { readonly model: PanelModel; readonly state: State }): React.JSX.Element {
  const [count, setCount] = React.useState("1");
  const [what, setWhat] = React.useState<Next["what"]>("event");
  const able = can(state);
  const head = headline(state);
  const run = (command: Command): void => {
    void model.do(command);
  };
  const steps = Math.max(1, Math.round(Number(count)) || 1);
  const step: Command = { word: "step", ...(steps === 1 ? {} : { count: steps }), background: true };
  return (
    <div className="fsdp-Controls">
      <div className="fsdp-Tools" role="toolbar" aria-label="training">
        <Tool icon={runIcon} label={`Step ${steps}\u00d7`} command={step} isEnabled={able.step} run={run} />
        <label title="training steps">
          <span className="fsdp-unseen">Training steps</span>
          <Text type="number" min={1} value={count} change={setCount} />
        </label>
        <span className="fsdp-gap" />
        <Tool icon={pauseIcon} label="Pause inside the step" command={{ word: "pause" }} isEnabled={able.pause} run={run} />
        <Tool icon={fastForwardIcon} label="Continue" command={{ word: "continue" }} isEnabled={able.goOn} run={run} />
        <Tool icon={stopIcon} label="Abort" command={{ word: "abort" }} isEnabled={able.abort} run={run} />
        <span className="fsdp-gap" />
        <span className="fsdp-Pair">
          <Tool icon={stepOverIcon} label={`Go on to the next ${what}`} command={{ word: "next", what }} isEnabled={able.goOn} run={run} />
          <label title="how far next goes">
            <span className="fsdp-unseen">Size of next</span>
            <Choice
              value={what ?? "event"}
              among={SIZES}
              choose={setWhat}
            />
          </label>
        </span>
      </div>
      <p className={`fsdp-Headline fsdp-mod-${head.tone}`} title={head.short === undefined ? undefined : head.text}>
        {head.short ?? head.text}
        {head.todo === undefined ? null : <span className="fsdp-Todo">{head.todo}</span>}
      </p>
      <p className="fsdp-unseen" role="status" aria-label="state of the ranks">
        {announcement(state)}
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

function Figure({ name, value }: { readonly name: string; readonly value: string }): React.JSX.Element {
  return (
    <span>
      <small>{name}</small> <b>{value || "\u2013"}</b>
    </span>
  );
}
