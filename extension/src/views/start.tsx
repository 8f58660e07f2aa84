/** The form that starts ranks, or attaches to running engines. */
import * as React from "react";

import type { PanelModel } from "../model";
import type { Abort, Attach, Start } from "../protocol";
import { commandOf, type Device, DEVICES, hasMore, PLAIN, type Wanted, withWord } from "../starting";
import { count, crowding } from "../words";
import { Action, Choice, Field, Text } from "./parts";

interface StartFormProps {
  readonly numRanks: number;
  readonly device: Device;
  readonly isEnabled: boolean;
  /** Why not, a sentence; empty: no message. */
  readonly why: string;
  /** Whether ranks are being started, from here or by a typed line. */
  readonly isAtWork: boolean;
  readonly start: (command: Start | Attach) => Promise<unknown>;
  /** Keeps the typed values while the form is not shown. */
  readonly model: PanelModel;
}

const ABORT: Abort = { word: "abort" };
const FROM = [["start", "new processes"], ["attach", "a cluster"]] as const;

export function StartForm({ numRanks, device, isEnabled, why, isAtWork, start, model }: StartFormProps): React.JSX.Element {
  const [wanted, setWanted] = React.useState<Wanted>(model.wanted ?? { ...PLAIN, ranks: String(numRanks), device });
  const set = (more: Partial<Wanted>): void => {
    model.wanted = { ...wanted, ...more };
    setWanted(model.wanted);
  };
  const command = commandOf(wanted);
  const isAttach = wanted.word === "attach";
  const isHere = !isAttach && wanted.engines === "" && wanted.profile === "";
  const hint = isHere ? crowding(Number(wanted.ranks), model.state?.cluster.cores) : "";
  return (
    <form
      className="fsdp-Form"
      onSubmit={(event) => {
        event.preventDefault();
        if (command !== null) void start(command);
      }}
    >
      <Field label="From" hint="start new processes, or attach to a running ipyparallel cluster">
        <Choice
          value={wanted.word}
          among={FROM}
          choose={(word) => {
            set(withWord(wanted, word, numRanks));
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
      {hint ? <p className="fsdp-note">{hint}</p> : null}
      <Field label="Device" hint="where the ranks compute">
        <Choice value={wanted.device} among={DEVICES} choose={(chosen) => { set({ device: chosen }); }} />
      </Field>
      {isAttach ? (
        <p className="fsdp-note">
          {wanted.take
            ? "Takes control of ranks whose notebook has ended."
            : "Ranks that another notebook controls can only be viewed."}
        </p>
      ) : null}
      <More wanted={wanted} set={set} />
      <Action
        className="jp-mod-styled jp-mod-accept"
        isEnabled={isEnabled && command !== null && !isAtWork}
        command={command ?? undefined}
      >
        {label(wanted, isAtWork)}
      </Action>
      {why ? <p className="fsdp-note" role="status">{why}</p> : null}
      {model.state?.cluster.exchange === "start" ? (
        <Action className="jp-mod-styled" isEnabled={!model.isGivingUp} run={() => void model.do(ABORT)} command={ABORT}>
          {model.isGivingUp ? "Cancelling\u2026" : "Cancel"}
        </Action>
      ) : null}
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

/** Fields that select a cluster. */
function Which({ wanted, set }: PartProps): React.JSX.Element {
  return (
    <>
      <Field label="Profile" hint="IPython profile that the cluster was started with">
        <Text value={wanted.profile} placeholder="default" change={(profile) => { set({ profile }); }} />
      </Field>
      <Field label="Cluster id" hint="id of a cluster of that profile">
        <Text value={wanted.clusterId} placeholder="the only one" change={(clusterId) => { set({ clusterId }); }} />
      </Field>
      <Field label="File" hint="client connection file, ipcontroller-client.json, instead of profile and id">
        <Text value={wanted.file} placeholder="connection file" change={(file) => { set({ file }); }} />
      </Field>
    </>
  );
}

/** Rarely needed fields. */
function More({ wanted, set }: PartProps): React.JSX.Element {
  const [isOpen, setIsOpen] = React.useState(hasMore(wanted)); // open if any is set
  return (
    <details className="fsdp-More" open={isOpen} onToggle={({ currentTarget }) => { setIsOpen(currentTarget.open); }}>
      <summary>More</summary>
      {wanted.word === "start" ? (
        <>
          <Field label="Engines" hint="ipyparallel launcher of the engines, also for other machines">
            <Text value={wanted.engines} placeholder="ssh, slurm, mpi" change={(engines) => { set({ engines }); }} />
          </Field>
          <Field label="Profile" hint="IPython profile with the ipyparallel configuration">
            <Text value={wanted.profile} placeholder="none" change={(profile) => { set({ profile }); }} />
          </Field>
        </>
      ) : (
        <Field label="Take" hint="take control of ranks whose notebook has ended">
          <input type="checkbox" checked={wanted.take} onChange={({ target }) => { set({ take: target.checked }); }} />
        </Field>
      )}
      <Field label="Interface" hint="network interface on which hosts reach each other">
        <Text value={wanted.interface} placeholder="default route" change={(name) => { set({ interface: name }); }} />
      </Field>
    </details>
  );
}
