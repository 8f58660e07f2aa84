/** Rows of the list of ranks: by host if there are several, and with many ranks one row for alike ones. */
import { formatDuration } from "../../workbench/widgets/static/format.js";
import type { ClockState, RankState } from "./protocol";

/** Number of ranks up to which each has a row. */
export const FEW = 16;

/** Ranks shown in one row. */
export interface Row {
  readonly key: string;
  readonly ranks: readonly RankState[];
}

export interface Host {
  readonly name: string;
  readonly ranks: readonly RankState[];
  readonly rows: readonly Row[];
}

export function hosts(ranks: readonly RankState[]): readonly Host[] {
  return [...grouped(ranks, ({ host }) => host)].map(([name, there]) => ({
    name,
    ranks: there,
    rows: [...grouped(there, ranks.length > FEW ? alike : alone)].map(([key, some]) => ({ key, ranks: some })),
  }));
}

/** The clock error of a host, and a description of its clock; null: it is rank 0's clock, or unknown. */
export function clockOf({ ranks }: Host, clocks: readonly ClockState[]): { readonly note: string; readonly text: string } | null {
  const found = clocks.find((clock) => ranks.some(({ rank }) => clock.ranks.includes(rank)));
  return found === undefined ? null : { note: `clock \u00b1 ${formatDuration(found.error_ns / 1000)}`, text: found.text };
}

/** What ranks are doing, in one line: `14 running, 2 waiting`. */
export function doing(ranks: readonly RankState[]): string {
  const found = [...grouped(ranks, ({ health }) => health)];
  if (found.length === 1) return found[0]?.[0] ?? "";
  return found.map(([health, some]) => `${some.length} ${health}`).join(", ");
}

function alone({ rank }: RankState): string {
  return String(rank);
}

/**
 * Key of ranks that share a row. Ranks at work are alike wherever they are: their places change all the time, and rows
 * would appear and vanish.
 */
function alike({ health, where }: RankState): string {
  return health === "idle" || health === "running" || health === "waiting" ? "at work" : `${health} ${where}`;
}

function grouped<T>(all: readonly T[], keyOf: (one: T) => string): ReadonlyMap<string, readonly T[]> {
  const found = new Map<string, T[]>();
  for (const one of all) {
    const key = keyOf(one), there = found.get(key);
    if (there === undefined) found.set(key, [one]);
    else there.push(one);
  }
  return found;
}
