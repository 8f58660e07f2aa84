/** The record: views in tabs, verification of a step, and export, opening and comparison of records. */
import * as React from "react";

import type { ViewWord } from "../actions";
import type { PanelModel } from "../model";
import { type Command, type Compare, type Export, FAULT_KINDS, type Open, VIEWS } from "../protocol";
import { obstacles, type Typed } from "../words";
import { Action, Choice, Field, Line, Text } from "./parts";

interface LookingProps {
  readonly model: PanelModel;
  /** Run a command, and show its picture in a tab. */
  readonly draw: (command: Typed) => void;
  /** Run a JupyterLab command. */
  readonly execute: (command: string) => void;
}

const NOTHING = "Nothing is recorded yet.";
const LINT: Command = { word: "lint" };
const VERIFY: Command = { word: "verify" };
const TABLES = [
  ["status", "Status", "Where the ranks are, what is sharded, and what is recorded"],
  ["where", "Where", "Where every rank is, and since when"],
] as const;

export function Views({ model, draw, execute }: LookingProps): React.JSX.Element {
  const { state } = model;
  const isRecorded = state?.is_recorded === true, isRunning = state?.cluster.is_running === true;
  const verify = obstacles(state, model.prepared).step, lint = obstacles(state, model.prepared).lint;
  return (
    <div className="fsdp-Buttons">
      <Action className="jp-mod-styled" isEnabled title="Live dashboard beside the notebook" run={() => { execute("fsdp:open-dashboard"); }}>
        Dashboard
      </Action>
      {Object.entries(VIEWS).map(([word, about]) => (
        <Action
          key={word}
          className="jp-mod-styled"
          isEnabled={isRecorded}
          title={isRecorded ? capital(about) : NOTHING}
          run={() => { draw({ word: word as ViewWord }); }}
          command={{ word: word as ViewWord }}
        >
          {capital(word)}
        </Action>
      ))}
      {TABLES.map(([word, label, about]) => (
        <Action
          key={word}
          className="jp-mod-styled"
          isEnabled={word === "status" || isRunning}
          title={about}
          run={() => { draw({ word }); }}
          command={{ word }}
        >
          {label}
        </Action>
      ))}
      <Action
        className="jp-mod-styled"
        isEnabled={lint === ""}
        title={lint || "Check sharded models without running them"}
        run={() => void model.do(LINT)}
        command={LINT}
      >
        Lint
      </Action>
      <Action
        className="jp-mod-styled"
        isEnabled={verify === ""}
        title={verify || "Compare a step with the same step of an unsharded copy"}
        run={() => void model.do(VERIFY)}
        command={VERIFY}
      >
        Verify
      </Action>
    </div>
  );
}

function capital(word: string): string {
  return `${word.slice(0, 1).toUpperCase()}${word.slice(1)}`;
}

/** Why something is as it is, with the picture that shows it. */
export function Explain({ model, draw }: Omit<LookingProps, "execute">): React.JSX.Element {
  const isRecorded = model.state?.is_recorded === true;
  const [subject, setSubject] = React.useState("");
  const explain = `explain ${subject}`.trim();
  return (
    <Line run={() => { draw(explain); }}>
      <Field label="Explain" isWide hint="step, wait, peak, a unit such as blocks.2, or a rank such as 1; empty: what matters most">
        <Text value={subject} placeholder="step, wait, peak, UNIT, RANK" change={setSubject} />
      </Field>
      <Action className="jp-mod-styled" isEnabled={isRecorded} title={isRecorded ? undefined : NOTHING} command={explain}>
        Explain
      </Action>
    </Line>
  );
}

const RANDOM = "random"; // as in the words of %fsdp

/** A fault to inject into the training, and its removal. */
export function Fault({ model }: Pick<LookingProps, "model">): React.JSX.Element {
  const [name, setName] = React.useState(RANDOM);
  const why = obstacles(model.state, model.prepared).step;
  const inject: Command = { word: "fault", name }, remove: Command = { word: "fault", name: "off" };
  const about = (FAULT_KINDS as Readonly<Record<string, string>>)[name] ?? "One that is named when it is removed";
  return (
    <Line run={() => void model.do(inject)}>
      <Field label="Fault" isWide hint={capital(about)}>
        <Choice value={name} among={[RANDOM, ...Object.keys(FAULT_KINDS)]} choose={setName} />
      </Field>
      <Action className="jp-mod-styled" isEnabled={why === ""} title={why || capital(about)} command={inject}>
        Inject
      </Action>
      <Action className="jp-mod-styled" isEnabled={why === ""} title={why || "Remove the fault, and name it"} run={() => void model.do(remove)} command={remove}>
        Remove
      </Action>
    </Line>
  );
}

/** Export, opening and comparison of records. */
export function Record({ model, draw }: Omit<LookingProps, "execute">): React.JSX.Element {
  const { state } = model;
  const isRecorded = state?.is_recorded === true;
  const why = obstacles(state).start; // with ranks, or while some start, no file can be opened
  const [path, setPath] = React.useState("run.html"), [file, setFile] = React.useState("run.trace");
  const [before, setBefore] = React.useState("last:1"), [after, setAfter] = React.useState("last:-1");
  const write: Export = { word: "export", path: path.trim() };
  const open: Open = { word: "open", path: file.trim() };
  const compare: Compare = { word: "compare", a: before.trim(), b: after.trim() };
  return (
    <>
      <Line run={() => void model.do(write)}>
        <Field label="Export to" isWide hint="File to write: .html is a page that replays the trace, .trace can be opened here, .json is for Perfetto">
          <Text value={path} placeholder="run.html" change={setPath} />
        </Field>
        <Action className="jp-mod-styled" isEnabled={isRecorded && write.path !== ""} title={isRecorded ? undefined : NOTHING} command={write}>
          Export
        </Action>
      </Line>
      <Line run={() => void model.do(open)}>
        <Field label="Open" isWide hint="Path of an exported .trace file, relative to the notebook">
          <Text value={file} placeholder="run.trace" change={setFile} />
        </Field>
        <Action className="jp-mod-styled" isEnabled={why === "" && open.path !== ""} title={why} command={open}>
          Open
        </Action>
      </Line>
      <Line run={() => { draw(compare); }}>
        <Field label="Compare" isWide hint="Steps of the trace, such as last:3, last:3..5 or last:-1 (the newest that has ended), or a .trace file">
          <span className="fsdp-inline">
            <Text value={before} label="Compare" change={setBefore} />
            <Text value={after} label="Compare with" change={setAfter} />
          </span>
        </Field>
        <Action className="jp-mod-styled" isEnabled={compare.a !== "" && compare.b !== ""} command={compare}>
          Compare
        </Action>
      </Line>
    </>
  );
}
