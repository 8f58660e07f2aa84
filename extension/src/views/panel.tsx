/** The whole panel, rendered from the model. */
import { UseSignal } from "@jupyterlab/ui-components";
import * as React from "react";

import { UNIT_STATES } from "../../../workbench/widgets/static/events.js";
import type { PanelModel } from "../model";
import type { Attach, Command, Start, State } from "../protocol";
import type { Settings } from "../settings";
import { can, count, exchanging, explained, headline, hostsInWords, todo, type Typed } from "../words";
import { Breakpoints } from "./breakpoints";
import { Controls, Told } from "./controls";
import { Explain, Fault, Record, Views } from "./looking";
import { Output } from "./output";
import { Action, type Folding, Section } from "./parts";
import { Ranks } from "./ranks";
import { Script } from "./script";
import { ShardForm } from "./shard";
import { Spoken } from "./spoken";
import { StartForm } from "./start";
import { Units } from "./units";

export interface PanelProps {
  readonly model: PanelModel;
  /** Name of the followed notebook; empty: none. */
  readonly notebook: string;
  readonly settings: Settings;
  readonly folding: Folding;
  readonly start: (command: Start | Attach) => Promise<unknown>;
  readonly load: () => void;
  readonly reconnect: () => void;
  /** Stop the ranks, after confirmation if they are at work. */
  readonly stop: () => void;
  readonly copy: (line: string) => void;
  /** Run a command, and show its picture or table in a tab. */
  readonly draw: (command: Typed) => void;
  /** Show a text in a tab. */
  readonly tabulate: (name: string, text: string) => void;
  /** Open a page that the kernel wrote, by its path relative to the notebook. */
  readonly openPage: (path: string) => void;
  /** Run a JupyterLab command. */
  readonly execute: (command: string) => void;
  /** Unfold a section of the panel, and go to it. */
  readonly show: (section: string) => void;
}

export function Panel(props: PanelProps): React.JSX.Element {
  return <UseSignal signal={props.model.changed}>{() => <Body {...props} />}</UseSignal>;
}

function Body(props: PanelProps): React.JSX.Element {
  const { model, notebook, settings, folding, start, load, reconnect, copy, draw, tabulate, openPage, execute } = props;
  const { standing, state } = model;
  const notice = explained(standing, model.loadError);
  const colours = UNIT_STATES.map(({ words, colour }) => settings.colours[words] ?? colour);
  const isNotLoaded = notice.action === "load", isCut = notice.action === "reconnect";
  const isBad = isCut || (standing.kind === "silent" && standing.why === "lost") || standing.kind === "refused";
  const isRunning = state?.cluster.is_running === true;
  const isAtWork = model.isStarting || state?.cluster.exchange === "start";
  const isLoading = model.isStarting && state === null;
  const isQuiet = standing.kind === "silent" && isAtWork; // a start keeps the kernel busy
  return (
    <div className={`fsdp-Panel-body${standing.kind === "silent" && !isQuiet ? " fsdp-mod-silent" : ""}`}>
      <p className="fsdp-Whose" title={notebook}>
        {notebook || "\u00a0"}
      </p>
      {notice.text && !isLoading && !isQuiet ? (
        <p className={`fsdp-Notice${isBad ? " fsdp-mod-bad" : ""}`} role="status">
          {notice.text}
        </p>
      ) : null}
      {isCut ? (
        <p className="fsdp-Notice">
          <button type="button" className="jp-mod-styled jp-mod-accept" onClick={reconnect}>
            Reconnect
          </button>
        </p>
      ) : null}
      {state === null ? null : <Advice {...props} />}
      {isNotLoaded || isLoading || (state !== null && !isRunning) ? (
        <StartForm
          key={`${settings.numRanks} ${settings.device}`}
          numRanks={settings.numRanks}
          device={settings.device}
          isEnabled={((standing.kind === "live" && can(state).start) || isNotLoaded) && !isAtWork}
          isAtWork={isAtWork}
          why={isLoading ? "Loading the workbench in the kernel\u2026" : exchanging(state)}
          start={start}
          model={model}
        />
      ) : null}
      {isNotLoaded && !isLoading ? (
        <button type="button" className="fsdp-Link" onClick={load}>
          Load the workbench without starting ranks
        </button>
      ) : null}
      {isRunning ? (
        <Running {...props} colours={colours} />
      ) : (
        <>
          <Told {...{ model, tabulate, openPage }} />
          {state === null ? null : <Printed {...{ model, state, folding }} />}
          {model.units.length > 0 ? <Sharded model={model} colours={colours} folding={folding} draw={draw} /> : null}
        </>
      )}
      {state === null ? null : (
        <>
          {state.cluster.held_by ? null : (
            <Section name="Script" {...folding}>
              <Script model={model} />
            </Section>
          )}
          <Section name="Views" {...folding}>
            <Views model={model} draw={draw} execute={execute} />
            <Explain model={model} draw={draw} />
            <Fault model={model} />
          </Section>
          <Section name="Record" note={state.record} {...folding}>
            <Record model={model} draw={draw} />
          </Section>
        </>
      )}
      {model.spoken.length > 0 ? (
        <Section name="Commands" {...folding}>
          <Spoken spoken={model.spoken} copy={copy} />
        </Section>
      ) : null}
    </div>
  );
}

/** What is shown, or what to do next, with the button for it. */
function Advice({ model, execute, show }: PanelProps): React.JSX.Element | null {
  const { state, prepared } = model;
  if (state === null || exchanging(state) !== "" || model.isStarting) return null;
  const { cluster, record, is_recorded: isRecorded } = state;
  if (!cluster.is_running) {
    if (!isRecorded) return <p className="fsdp-Notice">No ranks yet.</p>;
    return (
      <p className="fsdp-Notice">
        {record === "" ? "No ranks are running. Showing their last recording." : `${record} is open, without ranks.`}{" "}
        <Link run={() => { execute("fsdp:open-dashboard"); }}>Show it in the dashboard</Link>
      </p>
    );
  }
  const next = todo(prepared);
  if (headline(state).todo !== undefined || state.request !== null || next === "" || !prepared.isKnown) return null;
  return (
    <div className="fsdp-Notice fsdp-Advice">
      {next}{" "}
      {prepared.isSharded || prepared.hasModel ? null : (
        <button type="button" className="jp-mod-styled jp-mod-accept" onClick={() => { execute("fsdp:example"); }}>
          Insert an example
        </button>
      )}
      {!prepared.isSharded && prepared.hasModel ? <Link run={() => { show("Shard"); }}>Go to the form</Link> : null}
    </div>
  );
}

function Link({ run, children }: { readonly run: () => void; readonly children: React.ReactNode }): React.JSX.Element {
  return (
    <button type="button" className="fsdp-Link fsdp-mod-inline" onClick={run}>
      {children}
    </button>
  );
}

const STOP: Command = { word: "stop" };
const DETACH: Command = { word: "detach" };
const TAKE: Attach = { word: "attach" };

interface RunningProps extends PanelProps {
  readonly colours: readonly string[];
}

function Running(props: RunningProps): React.JSX.Element | null {
  const { model, colours, folding, stop, draw, tabulate, openPage, start } = props;
  const { state } = model;
  if (state === null) return null;
  const { cluster, ranks, clocks } = state;
  const able = can(state);
  const isSharded = model.units.length > 0;
  const shard = cluster.held_by ? null : (
    <Section name="Shard" note={model.models.length > 0 ? count(model.models.length, "model") : ""} {...folding}>
      <ShardForm model={model} />
    </Section>
  );
  return (
    <>
      <Controls {...{ model, state, tabulate, openPage }} />
      {cluster.is_free ? (
        <p className="fsdp-Notice">
          <Action className="jp-mod-styled jp-mod-accept" isEnabled={!model.isStarting} run={() => void start(TAKE)} command={TAKE}>
            Take these ranks
          </Action>
        </p>
      ) : null}
      {isSharded ? null : shard}
      <Section name="Ranks" note={`${ranks.length} on ${hostsInWords(ranks)}`} {...folding}>
        <Ranks ranks={ranks} clocks={clocks} />
        {cluster.held_by ? null : (
          <Action className="fsdp-Link" isEnabled={able.stop} title={exchanging(state)} run={stop} command={STOP}>
            Stop the ranks
          </Action>
        )}
        {cluster.outlives ? (
          <Action
            className="fsdp-Link"
            isEnabled={able.detach}
            title={cluster.held_by ? "Stop showing these ranks" : "Leave the ranks running, with their variables; they can be attached again"}
            run={() => void model.do(DETACH)}
            command={DETACH}
          >
            {cluster.held_by ? "Stop watching" : "Detach"}
          </Action>
        ) : null}
      </Section>
      <Printed {...{ model, state, folding }} />
      <Sharded model={model} colours={colours} folding={folding} draw={draw} />
      {cluster.held_by ? null : <Stops model={model} folding={folding} />}
      {isSharded ? shard : null}
    </>
  );
}

/** What the ranks printed; nothing before they did. */
function Printed({ model, state, folding }: Pick<PanelProps, "model" | "folding"> & { readonly state: State }): React.JSX.Element | null {
  if (state.output === 0) return null;
  return (
    <Section name="Output" {...folding}>
      <Output model={model} numRanks={state.cluster.num_ranks} />
    </Section>
  );
}

/** The units. */
function Sharded({ model, colours, folding, draw }: Pick<RunningProps, "model" | "colours" | "folding" | "draw">): React.JSX.Element {
  const { units } = model;
  return (
    <Section name="Units" note={units.length > 0 ? String(units.length) : ""} {...folding}>
      {units.length > 0 ? (
        <Units model={model} colours={colours} draw={draw} />
      ) : (
        <p className="fsdp-note">No model is sharded.</p>
      )}
    </Section>
  );
}

/** The breakpoints of this notebook's ranks. */
function Stops({ model, folding }: Pick<RunningProps, "model" | "folding">): React.JSX.Element {
  const breakpoints = model.state?.breakpoints ?? [];
  const off = breakpoints.filter(({ is_on: isOn }) => !isOn).length;
  return (
    <Section
      name="Breakpoints"
      note={breakpoints.length > 0 ? `${breakpoints.length}${off > 0 ? `, ${off} off` : ""}` : ""}
      {...folding}
    >
      <Breakpoints model={model} />
    </Section>
  );
}
