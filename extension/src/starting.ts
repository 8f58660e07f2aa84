/** Fields of the form that starts or attaches ranks, and the command made of them. */
import { type Attach, DEVICES as NAMES, type Start } from "./protocol";

export type Device = NonNullable<Start["device"]>;
export const DEVICES = NAMES as readonly Device[];

/** The fields of the form as typed; the command's defaults apply to empty ones. */
export interface Wanted {
  readonly word: "start" | "attach";
  /** Empty for `attach`: all ranks. */
  readonly ranks: string;
  readonly device: Device;
  readonly profile: string;
  readonly interface: string;
  /** Launcher of `start`. */
  readonly engines: string;
  /** For `attach`, like those below. */
  readonly clusterId: string;
  readonly file: string;
  readonly take: boolean;
}

export const PLAIN: Omit<Wanted, "ranks" | "device"> = {
  word: "start",
  profile: "",
  interface: "",
  engines: "",
  clusterId: "",
  file: "",
  take: false,
};

const MOST = 1024;

/** The command of a form; null: the number of ranks is invalid. */
export function commandOf(wanted: Wanted): Start | Attach | null {
  const ranks = Number(wanted.ranks.trim());
  const isNumber = Number.isInteger(ranks) && ranks >= 1 && ranks <= MOST;
  const shared = {
    ...(wanted.device === "auto" ? {} : { device: wanted.device }),
    ...given("profile", wanted.profile),
    ...given("interface", wanted.interface),
  };
  if (wanted.word === "start") {
    return isNumber ? { word: "start", num_ranks: ranks, ...given("engines", wanted.engines), ...shared } : null;
  }
  if (!isNumber && wanted.ranks.trim() !== "") return null;
  return {
    word: "attach",
    ...(isNumber ? { num_ranks: ranks } : {}),
    ...given("cluster_id", wanted.clusterId),
    ...given("file", wanted.file),
    ...(wanted.take ? { take: true } : {}),
    ...shared,
  };
}

/** The form with another source of ranks. The profile is not carried over: it has another meaning there. */
export function withWord(wanted: Wanted, word: Wanted["word"], numRanks: number): Wanted {
  return { ...wanted, word, ranks: word === "attach" ? "" : String(numRanks), profile: "" };
}

/** Whether a rarely needed field is set. */
export function hasMore({ word, profile, interface: network, engines, take }: Wanted): boolean {
  return network !== "" || (word === "start" ? profile !== "" || engines !== "" : take);
}

/** A field, if it is not empty. */
function given<K extends string>(name: K, typed: string): Partial<Record<K, string>> {
  const text = typed.trim();
  return text === "" ? {} : ({ [name]: text } as Record<K, string>);
}
