/** The form that starts ranks, or attaches to engines that run already. */
import * as React from "react";

import type { PanelModel } from "../model";
import type { Attach, Start } from "../protocol";
import { commandOf, type Device, DEVICES, PLAIN, type Wanted } from "../starting";
import { count } from "../words";
import { Action, Choice, Field, Text } from "./parts";

interface StartFormProps {
  readonly numRanks: number;
  readonly device: Device;
  readonly isEnabled: boolean;
  /** Why not, a sentence; empty: there is nothing to say. */
  readonly why: string;
  readonly start: (command: Start | Attach) => Promise<unknown>;
  /** Keeps what is typed while the form is not there. */
  readonly model: PanelModel;
}

const FROM = [["start", "new processes"], ["attach", "a cluster"]] as const;

export function StartForm({ numRanks, device, isEnabled, why, start, model }: StartFormProps): React.JSX.Element {
  const [wanted, setWanted] = React.useState<Wanted>(model.wanted ?? { ...PLAIN, ranks: String(numRanks), device });
  const [isAtWork, setIsAtWork] = React.useState(false);
  const set = (more: Partial<Wanted>): void => {
    model.wanted = { ...wanted, ...more };
    setWanted(model.wanted);
  };
  const command = commandOf(wanted);
  const isAttach = wanted.word === "attach";
  return (
    <form
      className="fsdp-Form"
      onSubmit={(event) => {
        event.preventDefault();
        if (command === null) return;
        setIsAtWork(true);
        void start(command).finally(() => {
          setIsAtWork(false);
        });
      }}
    >
      <Field label="From" hint="start new processes, or attach to those of a cluster of ipyparallel that runs already">
        <Choice
          value={wanted.word}
          among={FROM}
          choose={(word) => {
            set({ word, ranks: word === "attach" ? "" : String(numRanks) });
          }}
        />
      </Field>
      {isAttach ? <Which wanted={wanted} set={set} /> : null}
      <Field label="Ranks" hint="processes that share the model">
        <Text
          type="number"
          min={1}
          value={wanted.ranks}
          placeholder={isAttach ? "all" : undefined}
          change={(ranks) => { set({ ranks }); }}
        />
      </Field>
      <Field label="Device" hint="where they compute">
        <Choice value={wanted.device} among={DEVICES} choose={(chosen) => { set({ device: chosen }); }} />
      </Field>
      <More wanted={wanted} set={set} />
      <Action
        className="jp-mod-styled jp-mod-accept"
        isEnabled={isEnabled && command !== null && !isAtWork}
        command={command ?? undefined}
      >
        {label(wanted, isAtWork)}
      </Action>
      {isAttach ? <p className="fsdp-note">Ranks that another notebook has can be looked at, and no more.</p> : null}
      {why ? <p className="fsdp-note" role="status">{why}</p> : null}
    </form>
  );
}

function label({ word, ranks }: Wanted, isAtWork: boolean): string {
  if (word === "attach") return isAtWork ? "Attaching\u2026" : "Attach";
  if (isAtWork) return "Starting\u2026";
  const number = Number(ranks);
  return `Start ${number >= 1 ? count(number, "rank") : "ranks"}`;
}

interface PartProps {
  readonly wanted: Wanted;
  readonly set: (more: Partial<Wanted>) => void;
}

/** Which cluster is meant. */
function Which({ wanted, set }: PartProps): React.JSX.Element {
  return (
    <>
      <Field label="Profile" hint="IPython profile that the cluster was started with">
        <Text value={wanted.profile} placeholder="default" change={(profile) => { set({ profile }); }} />
      </Field>
      <Field label="Cluster id" hint="which of the clusters of that profile">
        <Text value={wanted.clusterId} placeholder="the only one" change={(clusterId) => { set({ clusterId }); }} />
      </Field>
      <Field label="File" hint="its connection file for clients, ipcontroller-client.json, instead of profile and id">
        <Text value={wanted.file} placeholder="connection file" change={(file) => { set({ file }); }} />
      </Field>
    </>
  );
}

/** What few need. */
function More({ wanted, set }: PartProps): React.JSX.Element {
  return (
    <details className="fsdp-More">
      <summary>More</summary>
      {wanted.word === "start" ? (
        <>
          <Field label="Engines" hint="launcher of ipyparallel that starts them, on other machines too">
            <Text value={wanted.engines} placeholder="ssh, slurm, mpi" change={(engines) => { set({ engines }); }} />
          </Field>
          <Field label="Profile" hint="IPython profile whose configuration of ipyparallel applies">
            <Text value={wanted.profile} placeholder="none" change={(profile) => { set({ profile }); }} />
          </Field>
        </>
      ) : (
        <Field label="Take" hint="take the ranks from a notebook that is gone">
          <input type="checkbox" checked={wanted.take} onChange={({ target }) => { set({ take: target.checked }); }} />
        </Field>
      )}
      <Field label="Interface" hint="of the network, on which hosts reach each other">
        <Text value={wanted.interface} placeholder="that of the route" change={(name) => { set({ interface: name }); }} />
      </Field>
    </details>
  );
}
