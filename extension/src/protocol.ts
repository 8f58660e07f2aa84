// Made of workbench/live/messages.py, which describes each field, and the words of %fsdp by: python -m workbench.generate_front_end

export const TARGET = "workbench";
export const VERSION = 3;
export const DEVICES = ["auto", "cpu", "cuda"];
export const STRATEGIES = {"full": "FULL_SHARD", "grad": "SHARD_GRAD_OP", "none": "NO_SHARD", "hybrid": "HYBRID_SHARD", "hybrid2": "_HYBRID_SHARD_ZERO2"};
export const HYBRID = ["hybrid", "hybrid2"];
export const VIEWS = {"layout": "draw which rows of which parameter lie on which rank", "memory": "draw bytes by class over time, and name the peak", "timeline": "draw compute, collectives and waits of a step, per rank", "states": "draw which unit is sharded, gathering, unsharded or reducing, over time", "comms": "count collectives of a step per unit: calls, bytes, also between hosts, and time, beside what a formula says", "training": "draw loss, step time and what else is logged"};

/** Who asks. */
export interface Hello {
  readonly word: "hello";
  readonly number: number;
  readonly version: number;
  readonly extension: string;
}

/** Asks how everything is. */
export interface GetState {
  readonly word: "look";
  readonly number: number;
  readonly wait?: boolean;
}

/** Asks which models the ranks' cells have made. */
export interface FindModels { readonly word: "find models"; readonly number: number; }

/** Asks what a command `shard` or `reshard` would come to, before it is done. */
export interface PreviewCommand {
  readonly word: "try";
  readonly number: number;
  readonly command: Command;
}

/** Asks for the parameters of a unit. */
export interface FindParams {
  readonly word: "find params";
  readonly number: number;
  readonly unit: number;
}

/** Asks for the line that one could have typed for a command. */
export interface FormatCommand {
  readonly word: "spell";
  readonly number: number;
  readonly command: Command;
}

/** Asks for a command to be done, as the line typed into a cell would be. */
export interface RunCommand {
  readonly word: "do";
  readonly number: number;
  readonly command: Command;
}

/** Asks which commands were done in this notebook. */
export interface GetHistory { readonly word: "recall"; readonly number: number; }

/** Asks what is new. */
export interface AskFeed { readonly word: "feed"; readonly view: string; readonly wait: boolean; }

/** Asks for all ranks at a time. */
export interface AskAt {
  readonly word: "at";
  readonly view: string;
  readonly number: number;
  readonly t_us: number;
}

/** Asks for all ranks some events after a row. */
export interface AskBeside {
  readonly word: "beside";
  readonly view: string;
  readonly number: number;
  readonly rank: number;
  readonly seq: number;
  readonly by: number;
}

/** Asks for all that happened in a part of time. */
export interface AskWindow {
  readonly word: "window";
  readonly view: string;
  readonly number: number;
  readonly from_us: number;
  readonly to_us: number;
}

/** Asks for what a button says. */
export interface RunButton {
  readonly word: "press";
  readonly view: string;
  readonly button: string;
  readonly argument: string;
}

/** Says that a view is gone. */
export interface CloseView { readonly word: "bye"; readonly view: string; }

/** What the browser has to know from the beginning. */
export interface InitialState {
  readonly buttons: readonly string[];
  readonly panels: readonly ("ranks" | "memory" | "units" | "timeline")[];
  readonly sizes: readonly string[];
}

/** Who answers. */
export interface Welcome {
  readonly word: "welcome";
  readonly number: number;
  readonly version: number;
  readonly workbench: string;
  readonly dashboard: InitialState;
  readonly problem: string;
}

/** Whose ranks they are. */
export interface ClusterState {
  readonly is_running: boolean;
  readonly exchange: "" | "start" | "stop" | "open";
  readonly waits_for: string;
  readonly num_ranks: number;
  readonly device: string;
  readonly profile: string;
  readonly host: string;
  readonly kernel_pid: number;
  readonly outlives: boolean;
  readonly held_by: string;
  readonly is_free: boolean;
  readonly cores: number;
}

/** One rank now. */
export interface RankState {
  readonly rank: number;
  readonly health: "held" | "waiting" | "running" | "starting" | "idle" | "no answer" | "gone";
  readonly where: string;
  readonly host: string;
  readonly device: string;
  readonly pid: number;
  readonly num_bytes: readonly number[];
  readonly in_use: number;
  readonly peak_bytes: number;
  readonly peak_bytes_by_class: readonly number[];
  readonly peak: string;
}

/** A clock that is not rank 0's. */
export interface ClockState {
  readonly ranks: readonly number[];
  readonly error_ns: number;
  readonly text: string;
}

/** One unit of a sharded model: one `fully_shard` call, or one wrapper. */
export interface UnitInfo {
  readonly index: number;
  readonly name: string;
  readonly root: number;
  readonly num_params: number;
  readonly is_flat: boolean;
  readonly bytes_unsharded: number;
  readonly bytes_at_rest: number;
  readonly bytes_padding: number;
  readonly shard_size: number;
  readonly replicate_size: number;
  readonly reshard_after_forward: string;
  readonly compute_dtype: string;
  readonly reduce_dtype: string;
  readonly offload: boolean;
}

/** Where the units are on ranks that have them alike. */
export interface UnitStates { readonly ranks: readonly number[]; readonly states: string; }

/** A breakpoint. */
export interface BreakpointState {
  readonly id: number;
  readonly text: string;
  readonly is_on: boolean;
}

/** What the ranks were asked and have not ended. */
export interface RequestState {
  readonly line: string;
  readonly is_stopped: boolean;
  readonly stop: string;
  readonly reasons: readonly string[];
  readonly in_background: boolean;
  readonly steps_done: number;
  readonly steps_total: number;
}

/** How training goes. */
export interface TrainingSummary {
  readonly step: number;
  readonly loss: number | "nan" | "inf" | "-inf" | null;
  readonly loss_step: number;
  readonly steps_per_s: number | null;
  readonly tokens_per_s: number | null;
}

/** The result of the last request, from any caller. */
export interface LastResult {
  readonly count: number;
  readonly line: string;
  readonly text: string;
  readonly is_error: boolean;
}

/** How everything is. */
export interface State {
  readonly word: "state";
  readonly number: number;
  readonly cluster: ClusterState;
  readonly ranks: readonly RankState[];
  readonly clocks: readonly ClockState[];
  readonly units: readonly UnitInfo[] | null;
  readonly unit_states: readonly UnitStates[];
  readonly breakpoints: readonly BreakpointState[];
  readonly request: RequestState | null;
  readonly training: TrainingSummary;
  readonly ended: LastResult | null;
  readonly is_recorded: boolean;
  readonly record: string;
  readonly said: string;
}

/** A class of modules that `wrap` may name. */
export interface WrapClass {
  readonly name: string;
  readonly count: number;
  readonly num_elements: number;
}

/**
 * How a model is sharded, in the words that `reshard` takes; for what only the other API has,
 * what is like it.
 */
export interface ModelPolicy {
  readonly api: "fully_shard" | "classic";
  readonly strategy: "full" | "grad" | "none" | "hybrid" | "hybrid2" | "";
  readonly orig_params: boolean;
  readonly wrap: readonly string[];
  readonly mesh: string;
  readonly reshard_after_forward: string | number;
  readonly mp: string;
  readonly offload: boolean | null;
  readonly prefetch: number;
}

/** A model that a rank's cells have made. */
export interface ModelInfo {
  readonly name: string;
  readonly class_name: string;
  readonly is_sharded: boolean;
  readonly num_params: number;
  readonly num_elements: number;
  readonly num_bytes: number;
  readonly classes: readonly WrapClass[];
  readonly suggested: readonly string[];
  readonly policy: ModelPolicy | null;
  readonly units: readonly number[];
}

/** A model that the ranks' cells have made, as the first rank that has it describes it. */
export interface Model extends ModelInfo { readonly ranks: readonly number[]; }

/** The models on the ranks. */
export interface Models {
  readonly word: "models";
  readonly number: number;
  readonly models: readonly Model[];
  readonly has_step: boolean;
  readonly text: string;
}

/** What ranks would hold between steps of training with Adam, in bytes. */
export interface RestPreview {
  readonly ranks: readonly number[];
  readonly params: number;
  readonly grads: number;
  readonly adam: number;
}

/** The collectives of one kind of one training step, on each rank. */
export interface SentPreview {
  readonly kind: string;
  readonly num_ranks: number;
  readonly calls: number;
  readonly num_bytes: number;
  readonly sent_bytes: number;
}

/** What a command would come to; nothing was done. */
export interface Preview {
  readonly word: "preview";
  readonly number: number;
  readonly line: string;
  readonly problem: string;
  readonly units: readonly string[];
  readonly bytes_unsharded: number;
  readonly bytes_ignored: number;
  readonly at_rest: readonly RestPreview[];
  readonly sent: readonly SentPreview[];
  readonly sent_bytes: number;
}

/** A parameter of a unit. */
export interface ParamInfo {
  readonly fqn: string;
  readonly shape: readonly number[];
  readonly dtype: string;
  readonly bytes_unsharded: number;
  readonly bytes_at_rest: number;
  readonly rows_per_rank: readonly number[];
  readonly is_trainable: boolean;
  readonly flat: string;
}

/** The parameters of a unit. */
export interface Params {
  readonly word: "params";
  readonly number: number;
  readonly unit: number;
  readonly params: readonly ParamInfo[];
}

/** A command as a line. */
export interface CommandLine {
  readonly word: "line";
  readonly number: number;
  readonly line: string;
}

/** What a command said. */
export interface CommandOutput {
  readonly word: "said";
  readonly number: number;
  readonly line: string;
  readonly text: string;
  readonly is_error: boolean;
  readonly data: unknown;
}

/** A command that was asked for in this notebook. */
export interface PastCommand {
  readonly line: string;
  readonly source: "cell" | "panel";
  readonly t_s: number;
}

/** The commands of this notebook; `%fsdp history` shows the same. */
export interface CommandHistory {
  readonly word: "recalled";
  readonly number: number;
  readonly commands: readonly PastCommand[];
}

/** A question that is malformed, or that cannot be answered; nothing was done. */
export interface Refused {
  readonly word: "refused";
  readonly number: number;
  readonly text: string;
  readonly view: string;
}

/** Something that has begun and not ended. */
export interface OpenSpan {
  readonly track: number;
  readonly kind: 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | 11 | 12 | 13 | 14 | 15 | 16 | 17 | 18 | 19 | 20 | 21;
  readonly unit: number;
  readonly start: number;
  readonly bytes: number;
}

/** How many entries each table in the buffer has. */
export interface Counts {
  readonly spans: number;
  readonly memory: number;
  readonly states: number;
  readonly steps: number;
}

/** Ranks that are alike now. */
export interface RankHealth {
  readonly label: string;
  readonly ranks: readonly number[];
  readonly state: "held" | "waiting" | "running" | "starting" | "idle" | "no answer" | "gone";
  readonly where: string;
}

/** What the ranks do, in a word, and why. */
export interface RunStatus {
  readonly word: "training" | "stuck" | "stopped" | "idle" | "over" | "dead" | "empty";
  readonly why: string;
  readonly can_go_on: boolean;
}

/** Ranks that were alike at a moment. */
export interface RanksAt {
  readonly ranks: readonly number[];
  readonly label: string;
  readonly doing: string;
  readonly units: readonly (0 | 1 | 2 | 3)[];
  readonly bytes: readonly number[];
  readonly in_use: number;
}

/** All ranks at a moment. */
export interface Moment {
  readonly t_us: number;
  readonly rank: number;
  readonly seq: number;
  readonly step: number;
  readonly event: string;
  readonly ranks: readonly RanksAt[];
}

/** The highest peak of memory so far of a group of ranks. */
export interface PeakInfo {
  readonly num_bytes: number;
  readonly t_us: number;
  readonly step: number;
  readonly text: string;
}

/** What some steps cost. */
export interface Costs {
  readonly num_steps: number;
  readonly ms: number;
  readonly exposed: number;
  readonly peak_bytes: number;
}

/** What the last turn of a knob has changed. */
export interface KnobEffect {
  readonly what: string;
  readonly at_step: number;
  readonly before: Costs;
  readonly after: Costs;
}

/** Where `%fsdp back` has put the cursor. */
export interface MovedCursor { readonly t_us: number; readonly moment: Moment | null; }

/** What a view does not know yet. */
export interface FeedUpdate {
  readonly word: "feed";
  readonly view: string;
  readonly restart: boolean;
  readonly another: boolean;
  readonly exact: boolean;
  readonly groups: readonly (readonly number[])[];
  readonly tracks: readonly number[];
  readonly open: readonly OpenSpan[];
  readonly counts: Counts;
  readonly begin_us: number;
  readonly health: readonly RankHealth[];
  readonly breakpoints: readonly BreakpointState[];
  readonly status: RunStatus;
  readonly whose: string;
  readonly said: string;
  readonly clock: readonly string[];
  readonly units: readonly string[] | null;
  readonly order: readonly number[] | null;
  readonly holds: readonly (readonly number[])[] | null;
  readonly now: Moment | null;
  readonly peaks: readonly PeakInfo[] | null;
  readonly late: string | null;
  readonly change: KnobEffect | null;
  readonly has_moved: boolean;
  readonly cursor: MovedCursor | null;
}

/** All ranks at a moment that was asked for. */
export interface MomentReply {
  readonly word: "moment";
  readonly view: string;
  readonly number: number;
  readonly moment: Moment | null;
}

/** What happened in a part of time. */
export interface WindowDetail {
  readonly word: "window";
  readonly view: string;
  readonly number: number;
  readonly from_us: number;
  readonly to_us: number;
  readonly exact: boolean;
  readonly counts: Counts;
}

/** What came of a button. */
export interface ButtonResult {
  readonly word: "pressed";
  readonly view: string;
  readonly button: string;
  readonly text: string;
}

/** Start ranks. */
export interface Start {
  readonly word: "start";
  readonly num_ranks?: number;
  readonly device?: "auto" | "cpu" | "cuda";
  readonly profile?: string | null;
  readonly engines?: string;
  readonly interface?: string;
}

/**
 * Use engines that are already running as ranks; engines that are ranks already keep their
 * variables.
 */
export interface Attach {
  readonly word: "attach";
  readonly num_ranks?: number | null;
  readonly profile?: string | null;
  readonly cluster_id?: string;
  readonly file?: string;
  readonly device?: "auto" | "cpu" | "cuda";
  readonly interface?: string;
  readonly take?: boolean;
}

/** Show the ranks, the sharded models, and the size of the trace. */
export interface Status { readonly word: "status"; }

/**
 * Detach from attached ranks; they keep running, with their variables, and can be attached
 * again.
 */
export interface Detach { readonly word: "detach"; }

/** Stop the ranks; the trace is kept. */
export interface Stop { readonly word: "stop"; }

/** Show the ranks live and at any past event, with buttons to stop inside a step. */
export interface Dashboard { readonly word: "dashboard"; }

/** Common fields of `shard` and `reshard`, in user notation. */
export interface Sharding {
  readonly wrap?: readonly string[];
  readonly mesh?: number | string | readonly number[];
  readonly reshard_after_forward?: string | number;
  readonly api?: string;
  readonly strategy?: string;
}

/** Shard a model with fully_shard or the classic wrapper, one unit per module of a class. */
export interface Shard extends Sharding {
  readonly word: "shard";
  readonly model: string;
  readonly orig_params?: boolean;
  readonly mp?: string;
  readonly offload?: boolean;
  readonly prefetch?: number;
  readonly ignore?: readonly string[];
}

/** Change the sharding of a model in place; optimizers keep their state. */
export interface Reshard extends Sharding {
  readonly word: "reshard";
  readonly model: string;
  readonly orig_params?: boolean | null;
  readonly mp?: string;
  readonly offload?: boolean | null;
  readonly prefetch?: number | null;
}

/** Make a sharded model a plain module again, with the same values. */
export interface Unshard { readonly word: "unshard"; readonly model: string; }

/** Train: call train_step() N times on every rank; a number that it returns is the loss. */
export interface Step {
  readonly word: "step";
  readonly count?: number;
  readonly fn?: string;
  readonly until?: string;
  readonly background?: boolean;
}

/** Stop all ranks at the same event of the running step. */
export interface Pause { readonly word: "pause"; }

/** Continue a stopped step to the next event, collective, unit or phase. */
export interface Next {
  readonly word: "next";
  readonly what?: "event" | "collective" | "unit" | "phase";
}

/** Continue a stopped step, in the background if it was started there. */
export interface Continue {
  readonly word: "continue";
  readonly foreground?: boolean;
  readonly background?: boolean;
}

/** Abort the running or stopped step or cell; the ranks are ready again afterwards. */
export interface Abort { readonly word: "abort"; }

/** Show where every rank is, and since when. */
export interface Where { readonly word: "where"; readonly stacks?: boolean; }

/**
 * Add, list or clear breakpoints, or turn them on and off; ranks stop before each matching
 * event.
 */
export interface Break {
  readonly word: "break";
  readonly action: "add" | "list" | "clear" | "on" | "off";
  readonly event?: string;
  readonly rank?: number | null;
  readonly when?: string | null;
}

/** Show each stopped rank's shard of a parameter, in a table. */
export interface Inspect { readonly word: "inspect"; readonly fqn: string; }

/** Evaluate an expression inside the stopped step, with the variables of its active functions. */
export interface Evaluate {
  readonly word: "eval";
  readonly expr: string;
  readonly ranks?: readonly number[];
  readonly frame?: number;
}

/** Show the trace as of N events ago, 0: the newest event; the ranks' work is not undone. */
export interface Back { readonly word: "back"; readonly n?: number; }

/** Compare a step with the same step of an unsharded copy; the training state is not changed. */
export interface Verify { readonly word: "verify"; readonly model?: string; readonly fn?: string; }

/** Draw which rows of which parameter lie on which rank. */
export interface DrawLayout {
  readonly word: "layout";
  readonly unit?: string | null;
  readonly fold?: boolean | null;
  readonly talk?: boolean | null;
}

/** Draw bytes by class over time, and name the peak. */
export interface DrawMemory {
  readonly word: "memory";
  readonly step?: number | null;
  readonly steps?: number | null;
  readonly rank?: number | null;
  readonly process?: boolean | null;
  readonly talk?: boolean | null;
}

/** Draw compute, collectives and waits of a step, per rank. */
export interface DrawTimeline {
  readonly word: "timeline";
  readonly step?: number | null;
  readonly steps?: number | null;
  readonly rank?: number | null;
  readonly talk?: boolean | null;
  readonly canvas?: boolean | null;
}

/** Draw which unit is sharded, gathering, unsharded or reducing, over time. */
export interface DrawStates {
  readonly word: "states";
  readonly step?: number | null;
  readonly steps?: number | null;
  readonly rank?: number | null;
  readonly unit?: string | null;
  readonly talk?: boolean | null;
}

/**
 * Count collectives of a step per unit: calls, bytes, also between hosts, and time, beside what
 * a formula says.
 */
export interface DrawComms {
  readonly word: "comms";
  readonly step?: number | null;
  readonly unit?: string | null;
  readonly talk?: boolean | null;
}

/** Draw loss, step time and what else is logged. */
export interface DrawTraining { readonly word: "training"; readonly talk?: boolean | null; }

/** Show what changed from one trace, or some of its steps, to another. */
export interface Compare {
  readonly word: "compare";
  readonly a: string;
  readonly b: string;
  readonly rank?: number | null;
  readonly talk?: boolean;
}

/**
 * Write the trace to a file: .trace to open again, .json for Perfetto, .html for a page that
 * replays it.
 */
export interface Export { readonly word: "export"; readonly path: string; readonly steps?: string; }

/** Show a trace file without ranks: every view, the dashboard, compare and export. */
export interface Open { readonly word: "open"; readonly path: string; }

/** List the commands of this notebook and its panel, as lines to copy. */
export interface History { readonly word: "history"; readonly n?: number; }

/** List the commands, or explain one of them. */
export interface Help { readonly word: "help"; readonly topic?: string; }

export type PanelQuestion =
  | Hello | GetState | FindModels | PreviewCommand | FindParams | FormatCommand | RunCommand
  | GetHistory;

export type PanelAnswer =
  | Welcome | State | Models | Preview | Params | CommandLine | CommandOutput | CommandHistory
  | Refused;

export type ViewQuestion =
  | AskFeed | AskAt | AskBeside | AskWindow | RunButton | CloseView;

export type ViewAnswer =
  | FeedUpdate | MomentReply | WindowDetail | ButtonResult | Refused;

export type Command =
  | Start | Attach | Status | Detach | Stop | Dashboard | Shard | Reshard | Unshard | Step | Pause
  | Next | Continue | Abort | Where | Break | Inspect | Evaluate | Back | Verify | DrawLayout
  | DrawMemory | DrawTimeline | DrawStates | DrawComms | DrawTraining | Compare | Export | Open
  | History | Help;

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
