/** Controls to step, stop and continue; and the state in one line. */
import { closeIcon, fastForwardIcon, pauseIcon, runIcon, stepOverIcon, stopIcon } from "@jupyterlab/ui-components";
import * as React from "react";

import { formatDuration, formatLoss } from "../../../workbench/widgets/static/format.js";
import type { PanelModel } from "../model";
import type { Command, Next, State, TrainingSummary } from "../protocol";
import { announcement, count as counted, goneOf, headline, isReplaceable, isTable, obstacles, pageWritten, ranksInWords } from "../words";
import { Action, Choice, ReplyText, Text, Tool } from "./parts";

const SIZES = ["event", "collective", "unit", "phase"] as const;

interface ControlsProps {
  readonly model: PanelModel;
  readonly state: State;
  readonly tabulate: (name: string, text: string) => void;
  /** Open a page that the kernel wrote, by its path relative to the notebook. */
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
        <span className="fsdp-Group">
          <Tool icon={runIcon} label={`Train ${counted(steps, "step")}`} command={step} obstacle={why.step} {...{ run, explain }} />
          <label title="Number of steps to train">
            <span className="fsdp-unseen">Training steps</span>
            <Text type="number" min={1} value={count} change={setCount} />
          </label>
          <span className="fsdp-note" aria-hidden="true">{steps === 1 ? "step" : "steps"}</span>
        </span>
        <span className="fsdp-Group">
          <Tool icon={pauseIcon} label="Pause inside the step" command={{ word: "pause" }} obstacle={why.pause} {...{ run, explain }} />
          <Tool icon={fastForwardIcon} label="Continue" command={{ word: "continue" }} obstacle={why.goOn} {...{ run, explain }} />
          <Tool icon={stopIcon} label="Abort" command={{ word: "abort" }} obstacle={why.abort} {...{ run, explain }} />
          <Tool icon={stepOverIcon} label={`Run to the next ${what}`} command={{ word: "next", what }} obstacle={why.goOn} {...{ run, explain }} />
          <label title="How far to run">
            <span className="fsdp-unseen">Size of next</span>
            <Choice value={what ?? "event"} among={SIZES} choose={setWhat} />
          </label>
        </span>
      </div>
      <Told {...{ model, tabulate, openPage }} />
      <p className={`fsdp-Headline fsdp-mod-${head.tone}`} title={head.short === undefined ? undefined : head.text}>
        {head.short ?? head.text}
        {head.todo === undefined ? null : <span className="fsdp-Todo">{head.todo}</span>}
      </p>
      {isReplaceable(state) ? <Replace model={model} state={state} why={why.heal} /> : null}
      <p className="fsdp-unseen" role="status" aria-label="state of the ranks">
        {announcement(state, model.isGivingUp)}
      </p>
      <Numbers training={state.training} />
    </div>
  );
}

const HEAL: Command = { word: "heal" };

/** The button that replaces ranks whose processes have ended. */
function Replace({ model, state, why }: Pick<ControlsProps, "model" | "state"> & { readonly why: string }): React.JSX.Element {
  return (
    <p className="fsdp-Replace">
      <Action
        className="jp-mod-styled jp-mod-accept"
        isEnabled={why === ""}
        title={why || "Start processes for them, run the cells again on all ranks, and go on from the newest snapshot"}
        run={() => void model.do(HEAL)}
        command={HEAL}
      >
        {state.cluster.exchange === "start" ? "Replacing" : "Replace"} {ranksInWords(goneOf(state))}
      </Action>
    </p>
  );
}

/** Progress of training. The newest loss may be of an earlier step than the current one. */
function Numbers({ training }: { readonly training: TrainingSummary }): React.JSX.Element {
  const { step, loss, loss_step: lossStep, steps_per_s: rate, tokens_per_s: tokens } = training;
  return (
    <p className="fsdp-Numbers">
      <Figure name="step" value={step < 0 ? "" : String(step)} />
      <Figure name="step time" value={rate === null ? "" : formatDuration(1e6 / rate)} />
      <Figure name="loss" value={loss === null ? "" : formatLoss(loss)} isWide>
        {loss === null ? null : <small>of step {lossStep}</small>}
      </Figure>
      {tokens === null ? null : <Figure name="tokens/s" value={Math.round(tokens).toLocaleString("en")} isWide />}
    </p>
  );
}

/** The newest reply, until the next one or until it is closed. */
export function Told({ model, tabulate, openPage }: Pick<ControlsProps, "model" | "tabulate" | "openPage">): React.JSX.Element | null {
  const { reply } = model;
  const [box, isCut] = useIsCut();
  if (reply === null) return null;
  const { line, text, isBad } = reply;
  const page = isBad ? null : pageWritten(text);
  return (
    <div className={`fsdp-Reply${isBad ? " fsdp-mod-bad" : ""}`} role={isBad ? "alert" : "status"} aria-label="reply">
      <button type="button" className="fsdp-Tool" title="Close" aria-label="Close the reply" onClick={() => { model.reply = null; }}>
        <closeIcon.react tag="span" width="14px" />
      </button>
      {line === "" ? null : <code title={line}>{line}</code>}
      <ReplyText box={box} text={text || "done"} label="text of the reply" />
      {isTable(text) || isCut ? (
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

/** A `ref` for an element, and whether its content is cut off. */
function useIsCut(): readonly [React.RefObject<HTMLDivElement>, boolean] {
  const box = React.useRef<HTMLDivElement>(null);
  const [isCut, setIsCut] = React.useState(false);
  React.useLayoutEffect(() => {
    const measure = (): void => {
      const node = box.current;
      setIsCut(node !== null && (node.scrollHeight > node.clientHeight || node.scrollWidth > node.clientWidth));
    };
    measure();
    const widths = new ResizeObserver(measure);
    if (box.current !== null) widths.observe(box.current);
    return () => { widths.disconnect(); };
  });
  return [box, isCut];
}

/** `%fsdp start -n 4` as `start`. */
function nameOf(line: string): string {
  return line.split(" ")[1] ?? "reply";
}

interface FigureProps {
  readonly name: string;
  readonly value: string;
  /** Whether it has a line of its own. */
  readonly isWide?: boolean;
  readonly children?: React.ReactNode;
}

function Figure({ name, value, isWide = false, children }: FigureProps): React.JSX.Element {
  return (
    <span className={isWide ? "fsdp-mod-wide" : undefined}>
      <small>{name}</small> <b>{value || "\u2013"}</b> {children}
    </span>
  );
}
