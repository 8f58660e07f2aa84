/** The whole panel, from the model. */
import { UseSignal } from "@jupyterlab/ui-components";
import * as React from "react";

import { UNIT_STATES } from "../../../workbench/widgets/static/events.js";
import type { PanelModel } from "../model";
import type { Attach, Command, Start } from "../protocol";
import type { Settings } from "../settings";
import { can, count, exchanging, explained, headline, hostsInWords } from "../words";
import { Breakpoints } from "./breakpoints";
import { Controls } from "./controls";
import { Action, type Folding, Section } from "./parts";
import { Ranks } from "./ranks";
import { ShardForm } from "./shard";
import { Spoken } from "./spoken";
import { StartForm } from "./start";
import { Units } from "./units";

export interface PanelProps {
  readonly model: PanelModel;
  /** Name of the notebook that is followed; empty: none. */
  readonly notebook: string;
  readonly settings: Settings;
  readonly folding: Folding;
  readonly start: (command: Start | Attach) => Promise<unknown>;
  readonly load: () => void;
  readonly reconnect: () => void;
  /** Stop the ranks, perhaps after asking whether that is meant. */
  readonly stop: () => void;
  readonly copy: (line: string) => void;
}

export function Panel(props: PanelProps): React.JSX.Element {
  return <UseSignal signal={props.model.changed}>{() => <Body {...props} />}</UseSignal>;
}

function Body({ model, notebook, settings, folding, start, load, reconnect, stop, copy }: PanelProps): React.JSX.Element {
  const { standing, state } = model;
  const notice = explained(standing, model.loadError);
  const colours = UNIT_STATES.map(({ words, colour }) => settings.colours[words] ?? colour);
  const isNotLoaded = notice.action === "load", isCut = notice.action === "reconnect";
  const isTold = state !== null && (exchanging(state) !== "" || (state.cluster.is_running && headline(state).todo !== undefined));
  const isBad = isCut || standing.kind === "silent" || standing.kind === "refused";
  const form = (
    <StartForm
      key={`${settings.numRanks} ${settings.device}`}
      numRanks={settings.numRanks}
      device={settings.device}
      isEnabled={(standing.kind === "live" && can(state).start) || isNotLoaded}
      why={exchanging(state)}
      start={start}
      model={model}
    />
  );
  return (
    <div className={`fsdp-Panel-body${standing.kind === "silent" ? " fsdp-mod-silent" : ""}`}>
      <p className="fsdp-Whose" title={notebook}>
        {notebook || "\u00a0"}
      </p>
      {notice.text ? (
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
      {isNotLoaded ? (
        <>
          {form}
          <button type="button" className="fsdp-Link" onClick={load}>
            Load the workbench without starting ranks
          </button>
        </>
      ) : null}
      {state === null ? null : (
        <>
          {state.said && !isTold ? <p className="fsdp-Notice">{state.said}</p> : null}
          {state.cluster.is_running ? null : form}
          {state.cluster.is_running ? <Running model={model} colours={colours} folding={folding} stop={stop} /> : null}
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

const STOP: Command = { word: "stop" };
const DETACH: Command = { word: "detach" };

interface RunningProps {
  readonly model: PanelModel;
  readonly colours: readonly string[];
  readonly folding: Folding;
  readonly stop: () => void;
}

function Running({ model, colours, folding, stop }: RunningProps): React.JSX.Element | null {
  const { state, units } = model;
  if (state === null) return null;
  const { cluster, ranks, clocks } = state;
  const able = can(state);
  return (
    <>
      <Controls model={model} state={state} />
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
            title="they stay as they are, with their variables, for whoever attaches next"
            run={() => void model.do(DETACH)}
            command={DETACH}
          >
            {cluster.held_by ? "Look no more" : "Detach"}
          </Action>
        ) : null}
      </Section>
      <Section name="Units" note={units.length > 0 ? String(units.length) : ""} {...folding}>
        {units.length > 0 ? <Units model={model} colours={colours} /> : <p className="fsdp-note">No model is sharded.</p>}
      </Section>
      {cluster.held_by ? null : <Shaping model={model} folding={folding} />}
    </>
  );
}

/** What changes something, of ranks that are this notebook's. */
function Shaping({ model, folding }: Pick<RunningProps, "model" | "folding">): React.JSX.Element {
  const breakpoints = model.state?.breakpoints ?? [];
  const off = breakpoints.filter(({ is_on: isOn }) => !isOn).length;
  return (
    <>
      <Section
        name="Breakpoints"
        note={breakpoints.length > 0 ? `${breakpoints.length}${off > 0 ? `, ${off} off` : ""}` : ""}
        {...folding}
      >
        <Breakpoints model={model} />
      </Section>
      <Section name="Shard" note={model.models.length > 0 ? count(model.models.length, "model") : ""} {...folding}>
        <ShardForm model={model} />
      </Section>
    </>
  );
}
