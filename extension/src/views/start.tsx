/** The form that starts ranks. */
import * as React from "react";

import type { Start } from "../protocol";
import { count } from "../words";
import { Action, Choice, Field, Text } from "./parts";

export type Device = NonNullable<Start["device"]>;
export const DEVICES: readonly Device[] = ["auto", "cpu", "cuda"];

interface StartFormProps {
  readonly numRanks: number;
  readonly device: Device;
  readonly isEnabled: boolean;
  /** Why not, a sentence; empty: there is nothing to say. */
  readonly why: string;
  readonly start: (command: Start) => Promise<unknown>;
}

export function StartForm({ numRanks, device: preset, isEnabled, why, start }: StartFormProps): React.JSX.Element {
  const [ranks, setRanks] = React.useState(String(numRanks));
  const [device, setDevice] = React.useState(preset);
  const [isStarting, setIsStarting] = React.useState(false);
  const number = Math.round(Number(ranks));
  const command: Start = { word: "start", num_ranks: number, ...(device === "auto" ? {} : { device }) };
  const isValid = number >= 1 && number <= 1024;
  return (
    <form
      className="fsdp-Form"
      onSubmit={(event) => {
        event.preventDefault();
        setIsStarting(true);
        void start(command).finally(() => {
          setIsStarting(false);
        });
      }}
    >
      <Field label="Ranks" hint="processes that share the model">
        <Text type="number" min={1} value={ranks} change={setRanks} />
      </Field>
      <Field label="Device" hint="where they compute">
        <Choice
          value={device}
          among={DEVICES}
          choose={(word) => {
            setDevice(DEVICES.find((each) => each === word) ?? "auto");
          }}
        />
      </Field>
      <Action
        className="jp-mod-styled jp-mod-accept"
        isEnabled={isEnabled && isValid && !isStarting}
        command={command}
      >
        {isStarting ? "Starting\u2026" : `Start ${isValid ? count(number, "rank") : "ranks"}`}
      </Action>
      {why ? <p className="fsdp-note" role="status">{why}</p> : null}
    </form>
  );
}
