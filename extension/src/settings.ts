/** The user's settings, read from JupyterLab's setting registry. */
import type { ISettingRegistry } from "@jupyterlab/settingregistry";

import { type Device, DEVICES } from "./starting";

export interface Settings {
  /** Minimum milliseconds from one state to the next. */
  readonly restMs: number;
  readonly numRanks: number;
  readonly device: Device;
  /** CSS colours of unit states, by name, where they differ from the dashboard's. */
  readonly colours: Readonly<Partial<Record<string, string>>>;
}

export const DEFAULTS: Settings = { restMs: 0, numRanks: 4, device: "auto", colours: {} };

export function settingsOf({ composite }: Pick<ISettingRegistry.ISettings, "composite">): Settings {
  const { pollMilliseconds: restMs, ranks, device, colours } = composite;
  return {
    restMs: typeof restMs === "number" ? restMs : DEFAULTS.restMs,
    numRanks: typeof ranks === "number" ? ranks : DEFAULTS.numRanks,
    device: DEVICES.find((each) => each === device) ?? DEFAULTS.device,
    colours: (colours ?? {}) as Settings["colours"],
  };
}
