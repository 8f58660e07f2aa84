/** Which rows the list of ranks has: by host where there are several, and of many ranks those that are alike in one. */
import { formatDuration } from "../../workbench/widgets/static/format.js";
import type { ClockState, RankState } from "./protocol";

/** Ranks up to which each has a row. */
export const FEW = 16;

/** Ranks that are shown in one row. */
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

/** How exact times of a host are, and by what its clock differs from rank 0's; null: it is rank 0's, or nobody knows. */
export function clockOf({ ranks }: Host, clocks: readonly ClockState[]): { readonly note: string; readonly text: string } | null {
  const found = clocks.find((clock) => ranks.some(({ rank }) => clock.ranks.includes(rank)));
  return found === undefined ? null : { note: `clock \u00b1 ${formatDuration(found.error_ns / 1000)}`, text: found.text };
}

/** `14 running, 2 waiting`: what ranks are doing, in one line. */
export function doing(ranks: readonly RankState[]): string {
  const found = [...grouped(ranks, ({ health }) => health)];
  if (found.length === 1) return found[0]?.[0] ?? "";
  return found.map(([health, some]) => `${some.length} ${health}`).join(", ");
}

function alone({ rank }: RankState): string {
  return String(rank);
}

/**
 * The same of ranks that are in one row. Those at work are alike wherever they are: that is another place in a moment,
 * and rows would come and go.
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
