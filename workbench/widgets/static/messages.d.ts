// Made of workbench/live/dashboard_messages.py and workbench/live/packing.py by: python -m workbench.widgets.generate_js

/** Asks what is new. */
export interface AskFeed {
  readonly ask: "feed";
  /** who asks. */
  readonly view: string;
  /** answer as soon as there is something, or after a while. */
  readonly wait: boolean;
}

/** Asks for all ranks at a time. */
export interface AskAt {
  readonly ask: "at";
  /** who asks. */
  readonly view: string;
  /** comes back with the answer. */
  readonly number: number;
  /** the time. */
  readonly t_us: number;
}

/** Asks for all ranks some events after a row. */
export interface AskBeside {
  readonly ask: "beside";
  /** who asks. */
  readonly view: string;
  /** comes back with the answer. */
  readonly number: number;
  /** whose row it is. */
  readonly rank: number;
  /** number of the row. */
  readonly seq: number;
  /** how many events after it; negative: before it. */
  readonly by: number;
}

/** Asks for all that happened in a part of time. */
export interface AskWindow {
  readonly ask: "window";
  /** who asks. */
  readonly view: string;
  /** comes back with the answer. */
  readonly number: number;
  /** where it begins. */
  readonly from_us: number;
  /** where it ends. */
  readonly to_us: number;
}

/** Asks for what a button says. */
export interface RunButton {
  readonly ask: "do";
  /** who asks. */
  readonly view: string;
  /** of the button, one of `InitialState.buttons`; or `break on`, `break off` or `break clear`. */
  readonly word: string;
  /**
   * up to the next what `next` goes; where `break` stops; which breakpoint, by number, is
   * switched or taken away; else empty.
   */
  readonly argument: string;
}

/** Says that a view is gone. */
export interface CloseView {
  readonly ask: "bye";
  /** which. */
  readonly view: string;
}

/** Something that has begun and not ended. */
export interface OpenSpan {
  /** number of its track. */
  readonly track: number;
  /** of what. */
  readonly kind: 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | 11 | 12 | 13 | 14 | 15 | 16 | 17 | 18 | 19 | 20 | 21;
  /** -1: none. */
  readonly unit: number;
  /** when it began. */
  readonly start: number;
  /** that it moves. */
  readonly bytes: number;
}

/** How many entries each table in the buffer has. */
export interface Counts {
  /** of this table. */
  readonly spans: number;
  /** of this table. */
  readonly memory: number;
  /** of this table. */
  readonly states: number;
  /** of this table. */
  readonly steps: number;
}

/** Ranks that are alike now. */
export interface RankHealth {
  /** which, in words. */
  readonly label: string;
  /** which. */
  readonly ranks: readonly number[];
  /** what they are doing. */
  readonly state: "held" | "waiting" | "running" | "starting" | "idle" | "no answer" | "gone";
  /** before what they are held; empty: they are not. */
  readonly where: string;
}

/** A breakpoint. */
export interface BreakpointState {
  /** its number, which `break clear`, `break on` and `break off` take. */
  readonly id: number;
  /** as it was written, such as `all_gather:blocks.2 --rank 1`. */
  readonly text: string;
  /** whether it stops ranks. */
  readonly is_on: boolean;
}

/** What the ranks do, in a word, and why. */
export interface RunStatus {
  /**
   * `empty`: nothing is recorded yet; `over`: there are no ranks any more, and this is what
   * they recorded.
   */
  readonly word: "training" | "stuck" | "stopped" | "idle" | "over" | "dead" | "empty";
  /** in words; empty: there is no more to say. */
  readonly why: string;
  /**
   * whether the notebook knows of the stop, and ranks can be let go on; it learns of it after
   * they stand.
   */
  readonly can_go_on: boolean;
}

/** Ranks that were alike at a moment. */
export interface RanksAt {
  /** which. */
  readonly ranks: readonly number[];
  /** which, in words. */
  readonly label: string;
  /** what they did last. */
  readonly doing: string;
  /** state of each unit, by number. */
  readonly units: readonly (0 | 1 | 2 | 3)[];
  /** live bytes of each class, in the order of `CATEGORIES`. */
  readonly bytes: readonly number[];
  /** these together, what is kept for reuse left out. */
  readonly in_use: number;
}

/** All ranks at a moment. */
export interface Moment {
  /** when. */
  readonly t_us: number;
  /** whose last event it is named after. */
  readonly rank: number;
  /** number of that event's row. */
  readonly seq: number;
  /** in which it was, -1: in none. */
  readonly step: number;
  /** what it was, in words. */
  readonly event: string;
  /** all ranks, alike ones together. */
  readonly ranks: readonly RanksAt[];
}

/** The highest peak of memory so far of a group of ranks. */
export interface PeakInfo {
  /** in use then. */
  readonly num_bytes: number;
  /** when. */
  readonly t_us: number;
  /** in which; -1: in none. */
  readonly step: number;
  /** what was going on, in words. */
  readonly text: string;
}

/** What some steps cost. */
export interface Costs {
  /** how many. */
  readonly num_steps: number;
  /** of a step, in milliseconds, the median. */
  readonly ms: number;
  /** share of it in which compute waited, the median. */
  readonly exposed: number;
  /** most bytes in use in the last few of them. */
  readonly peak_bytes: number;
}

/** What the last turn of a knob has changed. */
export interface KnobEffect {
  /** was turned, in words. */
  readonly what: string;
  /** the first step after it. */
  readonly at_step: number;
  /** the last steps before it. */
  readonly before: Costs;
  /** the last steps since. */
  readonly after: Costs;
}

/** Where `%fsdp back` has put the cursor. */
export interface MovedCursor {
  /** when that is. */
  readonly t_us: number;
  /** all ranks there; None: nothing is recorded. */
  readonly moment: Moment | null;
}

/** What a view does not know yet. Its buffer has all tables. */
export interface FeedUpdate {
  readonly kind: "feed";
  /** whom it is for. */
  readonly view: string;
  /** forget what was told before, but for the steps. */
  readonly restart: boolean;
  /** these are other ranks than before: forget the steps as well. */
  readonly another: boolean;
  /** every change is told, not extremes alone. */
  readonly exact: boolean;
  /** ranks, alike ones together; the first is drawn for all. */
  readonly groups: readonly readonly number[][];
  /** the ranks with tracks in the timeline. */
  readonly tracks: readonly number[];
  /** what has not ended, in place of what was said to be so before. */
  readonly open: readonly OpenSpan[];
  /** of the tables. */
  readonly counts: Counts;
  /** where the record begins that the kernel has; negative where that is before the first step. */
  readonly begin_us: number;
  /** how the ranks are, alike ones together; none without ranks. */
  readonly health: readonly RankHealth[];
  /** in the order they were added, but for that of `step --until`. */
  readonly breakpoints: readonly BreakpointState[];
  /** what they do, in a word, and why. */
  readonly status: RunStatus;
  /** whose ranks these are, in words. */
  readonly whose: string;
  /** a sentence about what there is to see; empty while ranks train. */
  readonly said: string;
  /** whose times the timeline has, and whose the other panels; empty where there is one clock. */
  readonly clock: readonly string[];
  /** names of the units, by number, if there are others than before. */
  readonly units: readonly string[] | null;
  /** numbers of those that were not undone, from the top, together with `units`. */
  readonly order: readonly number[] | null;
  /**
   * where ranks were held or idle and for how long, `[[at, length], ...]`, if there are others
   * than before.
   */
  readonly holds: readonly readonly number[][] | null;
  /** all ranks at the newest event, if it is another one. */
  readonly now: Moment | null;
  /** of each group, if anything was recorded. */
  readonly peaks: readonly PeakInfo[] | null;
  /**
   * which rank the others wait for in the newest finished step, in words; empty: none; None: no
   * step has finished since the last time.
   */
  readonly late: string | null;
  /** what the last turn of a knob has changed, if that is known and new. */
  readonly change: KnobEffect | null;
  /** the cursor of `%fsdp back` is elsewhere than before. */
  readonly has_moved: boolean;
  /** where it is then; None: at the newest event. */
  readonly cursor: MovedCursor | null;
}

/** All ranks at a moment that was asked for. */
export interface MomentReply {
  readonly kind: "moment";
  /** whom it is for. */
  readonly view: string;
  /** of the question. */
  readonly number: number;
  /** None: nothing is recorded there. */
  readonly moment: Moment | null;
}

/** What happened in a part of time. Its buffer has all tables; there are no steps in it. */
export interface WindowDetail {
  readonly kind: "window";
  /** whom it is for. */
  readonly view: string;
  /** of the question. */
  readonly number: number;
  /** as it was asked. */
  readonly from_us: number;
  /** as it was asked. */
  readonly to_us: number;
  /** every change is told, not extremes alone. */
  readonly exact: boolean;
  /** of the tables. */
  readonly counts: Counts;
}

/** What came of a button. */
export interface ButtonResult {
  readonly kind: "said";
  /** whom it is for. */
  readonly view: string;
  /** of the button. */
  readonly word: string;
  /** a line; empty: what came of it is seen. */
  readonly text: string;
}

/** A question that cannot be read or answered; nothing was done. */
export interface QueryRefused {
  readonly kind: "refused";
  /** whom it is for. */
  readonly view: string;
  /** of the question; -1: it has none. */
  readonly number: number;
  /** why, in words. */
  readonly text: string;
}

/** What the browser has to know from the beginning. */
export interface InitialState {
  /** that the ranks can be told things with. */
  readonly buttons: readonly string[];
  /** to be shown. */
  readonly panels: readonly ("ranks" | "memory" | "units" | "timeline")[];
  /** how far `next` can go. */
  readonly sizes: readonly string[];
}

export type Question =
  | AskFeed
  | AskAt
  | AskBeside
  | AskWindow
  | RunButton
  | CloseView;

export type Answer =
  | FeedUpdate
  | MomentReply
  | WindowDetail
  | ButtonResult
  | QueryRefused;

export interface SpansTable {
  readonly start: Float64Array;
  readonly duration: Float32Array;
  readonly bytes: Float32Array;
  readonly before: Float32Array;
  readonly unit: Int16Array;
  readonly track: Uint8Array;
  readonly kind: Uint8Array;
  readonly exposed: Uint8Array;
}

export interface MemoryTable {
  readonly t: Float64Array;
  readonly bytes: Float32Array;
  readonly group: Uint8Array;
}

export interface StatesTable {
  readonly t: Float64Array;
  readonly unit: Int16Array;
  readonly group: Uint8Array;
  readonly state: Uint8Array;
}

export interface StepsTable {
  readonly t: Float64Array;
  readonly step: Int32Array;
  readonly loss: Float32Array;
  readonly has_loss: Uint8Array;
  readonly ms: Float32Array;
  readonly exposed: Float32Array;
  readonly model: Int32Array;
}

export interface Tables {
  readonly spans: SpansTable;
  readonly memory: MemoryTable;
  readonly states: StatesTable;
  readonly steps: StepsTable;
}
