/** Items, moments and news made up by tests. */
import type { FeedUpdate, Moment, RankHealth, RanksAt, Tables } from "../../../workbench/widgets/static/messages";
import type { Items } from "../../../workbench/widgets/static/timeline/items.js";
import { Track, type TrackName } from "../../../workbench/widgets/static/timeline/track.js";
import { pack, unpack } from "../../../workbench/widgets/static/unpack.js";

interface Item {
  readonly kind?: number;
  readonly unit?: number;
  readonly bytes?: number;
  readonly arrowFrom?: number;
  readonly exposed?: number;
}

/** Start and end of an item, and what matters of it besides. */
export type ItemRow = readonly [start: number, end: number, item?: Item];

export function items(...rows: ItemRow[]): Items {
  const column = (of: (item: Item) => number): number[] => rows.map(([, , item = {}]) => of(item));
  return {
    start: Float64Array.from(rows, ([start]) => start),
    end: Float64Array.from(rows, ([, end]) => end),
    bytes: Float64Array.from(column(({ bytes = 0 }) => bytes)),
    arrowFrom: Float64Array.from(column(({ arrowFrom = NaN }) => arrowFrom)),
    unit: Int16Array.from(column(({ unit = -1 }) => unit)),
    kind: Uint8Array.from(column(({ kind = 1 }) => kind)),
    exposed: Uint8Array.from(column(({ exposed = 0 }) => exposed)),
  };
}

export function track(name: TrackName, ...rows: ItemRow[]): Track {
  const made = new Track(name);
  made.append(items(...rows));
  return made;
}

/** Numbers from 0 to 1 that look random, the same for a seed. */
export function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state * 16807) % 2147483647;
    return state / 2147483647;
  };
}

export function tables(given: Parameters<typeof pack>[0] = {}): { counts: FeedUpdate["counts"]; tables: Tables; data: DataView } {
  const [counts, data] = pack(given);
  return { counts, tables: unpack(counts, data), data };
}

export function ranksAt(more: Partial<RanksAt> = {}): RanksAt {
  return { ranks: [0], label: "rank 0", doing: "forward of a", units: [0, 2], bytes: new Array<number>(10).fill(0), in_use: 0, ...more };
}

export function moment(t_us: number, more: Partial<Moment> = {}): Moment {
  return { t_us, rank: 0, seq: 7, step: -1, event: "an event", ranks: [ranksAt()], ...more };
}

export function health(state: RankHealth["state"], ranks: readonly number[], where = ""): RankHealth {
  return { state, ranks, label: `rank ${ranks.join()}`, where };
}

/** News of which a test says what it cares about. */
export function news(more: Partial<FeedUpdate> = {}): FeedUpdate {
  return {
    word: "feed", view: "v", restart: false, another: false, exact: true, groups: [], tracks: [], open: [],
    counts: { spans: 0, memory: 0, states: 0, steps: 0 }, begin_us: 0, health: [], breakpoints: [],
    status: { word: "training", why: "", can_go_on: false, fault: "" }, whose: "", said: "", clock: [], units: null, order: null,
    holds: null, now: null, peaks: null, late: null, change: null, has_moved: false, cursor: null, ...more,
  };
}

/** Rows of the table of steps: when each ended, and how long it lasted, in microseconds and milliseconds. */
export function steps(...rows: readonly (readonly [number, number])[]): Record<string, number[]> {
  const zero = rows.map(() => 0);
  return { t: rows.map(([t]) => t), ms: rows.map(([, ms]) => ms), step: rows.map((_, k) => k), loss: rows.map((_, k) => 1 + k),
    has_loss: rows.map(() => 1), exposed: rows.map(() => 0.25), model: zero };
}
