// Made of workbench/live/panel_messages.py and the words of %fsdp by: python -m workbench.panel.generate_protocol
// What a panel in the browser and the kernel say to each other: questions and answers, all of them declared here.

export const TARGET = "workbench.panel";

export const DASHBOARD_TARGET = "workbench.dashboard";

export const VERSION = 2;

export const DEVICES = ["auto", "cpu", "cuda"];

export const STRATEGIES = {"full": "FULL_SHARD", "grad": "SHARD_GRAD_OP", "none": "NO_SHARD", "hybrid": "HYBRID_SHARD", "hybrid2": "_HYBRID_SHARD_ZERO2"};

export const HYBRID = ["hybrid", "hybrid2"];

export const VIEWS = {"layout": "draw which rows of which parameter lie on which rank", "memory": "draw bytes by class over time, and name the peak", "timeline": "draw compute, collectives and waits of a step, per rank", "states": "draw which unit is sharded, gathering, unsharded or reducing, over time", "comms": "count collectives of a step per unit: calls, bytes, also between hosts, and time, beside what a formula says", "training": "draw loss, step time and what else is logged"};

/** Who asks. What it has never changes, so that any two versions understand each other this far. */
export interface Hello {
  readonly word: "hello";
  /** comes back with the answer. */
  readonly number: number;
  /** the browser's VERSION. */
  readonly version: number;
  /** version of the JupyterLab extension, such as `0.2.0`. */
  readonly extension: string;
}

/** Asks how everything is. */
export interface GetState {
  readonly word: "look";
  /** comes back with the answer. */
  readonly number: number;
  /**
   * answer as soon as something is new, after a second at the latest, and without the units
   * that were told before; a new question like this takes the place of the last one. Else: at
   * once, and everything.
   */
  readonly wait?: boolean;
}

/** Asks which models the ranks' cells have made. */
export interface FindModels {
  readonly word: "find models";
  /** comes back with the answer. */
  readonly number: number;
}

/** Asks what a command `shard` or `reshard` would come to, before it is done. */
export interface PreviewCommand {
  readonly word: "try";
  /** comes back with the answer. */
  readonly number: number;
  /** a command; of a word that cannot be tried the answer says so. */
  readonly command: Command;
}

/** Asks for the parameters of a unit. */
export interface FindParams {
  readonly word: "find params";
  /** comes back with the answer. */
  readonly number: number;
  /** index of the unit. */
  readonly unit: number;
}

/** Asks for the line that one could have typed for a command. */
export interface FormatCommand {
  readonly word: "spell";
  /** comes back with the answer. */
  readonly number: number;
  /** a command. */
  readonly command: Command;
}

/** Asks for a command to be done, as the line typed into a cell would be. */
export interface RunCommand {
  readonly word: "do";
  /** comes back with the answer. */
  readonly number: number;
  /** a command. */
  readonly command: Command;
}

/** Asks which commands were done in this notebook. */
export interface GetHistory {
  readonly word: "recall";
  /** comes back with the answer. */
  readonly number: number;
}

/** Who answers. */
export interface Welcome {
  readonly word: "welcome";
  /** of the question. */
  readonly number: number;
  /** the kernel's VERSION. */
  readonly version: number;
  /** version of the Python package. */
  readonly workbench: string;
  /**
   * a sentence with both versions and what to do, if they do not fit: all further questions are
   * refused then. Empty: they fit.
   */
  readonly problem: string;
}

/** Whose ranks they are. */
export interface ClusterState {
  /** whether there are any. */
  readonly is_running: boolean;
  /**
   * word of the command that starts or stops them at this moment, or opens a file: until it has
   * ended, others like it are refused. Empty: none.
   */
  readonly exchange: "" | "start" | "stop" | "open";
  /** what a start waits for, in a sentence; empty: it says nothing. */
  readonly waits_for: string;
  /** how many there are, or there would be with `start` and no number. */
  readonly num_ranks: number;
  /** where they were asked to compute: `auto`, or a kind of device. */
  readonly device: string;
  /** IPython profile that they were started with; empty: none. */
  readonly profile: string;
  /** machine of the notebook's kernel. */
  readonly host: string;
  /** its process. */
  readonly kernel_pid: number;
  /** whether the ranks' processes were there before: they can be left, and stay. */
  readonly outlives: boolean;
  /** who else commands the ranks, in words; they can be looked at only then. Empty: nobody. */
  readonly held_by: string;
  /**
   * whether the notebook that commanded them has let go of them, so that they can be attached
   * here.
   */
  readonly is_free: boolean;
  /** of the machine of the kernel, that ranks started there share. */
  readonly cores: number;
}

/** One rank now. */
export interface RankState {
  /** which. */
  readonly rank: number;
  /**
   * what it is doing; `gone`: its process is; `no answer`: it is there and has not answered in
   * time.
   */
  readonly health: "held" | "waiting" | "running" | "starting" | "idle" | "no answer" | "gone";
  /**
   * where it stands, in words, such as `before all-gather of blocks.2, step 3`; of a rank that
   * is gone, how it was lost.
   */
  readonly where: string;
  /** its machine. */
  readonly host: string;
  /** such as `cpu` or `cuda:0`. */
  readonly device: string;
  /** of its process. */
  readonly pid: number;
  /**
   * live bytes of each memory class, in the order of the classes (`CATEGORIES` of the
   * dashboard).
   */
  readonly num_bytes: readonly number[];
  /** those bytes together, what pools keep for reuse left out. */
  readonly in_use: number;
  /** most bytes in use there were at once. */
  readonly peak_bytes: number;
  /** each class at that moment. */
  readonly peak_bytes_by_class: readonly number[];
  /** what the rank was doing then, in words; empty: nothing is recorded. */
  readonly peak: string;
}

/** A clock that is not rank 0's. */
export interface ClockState {
  /** those that read it. */
  readonly ranks: readonly number[];
  /** how far it may be off from where it was found when the two were compared last. */
  readonly error_ns: number;
  /** where that was, in words. */
  readonly text: string;
}

/** One unit of a sharded model: one `fully_shard` call, or one wrapper. */
export interface UnitInfo {
  /** which. */
  readonly index: number;
  /** module path relative to its root, `(root)` for the root's own; its dots make the tree. */
  readonly name: string;
  /** index of the root unit of its model; -1: all its parameters are in other units. */
  readonly root: number;
  /** parameters (tensors); those in a flat one, not that. */
  readonly num_params: number;
  /** whether they lie in one flat parameter, of the classic API. */
  readonly is_flat: boolean;
  /** all its parameters in full. */
  readonly bytes_unsharded: number;
  /** what each rank keeps of them between steps, padding included. */
  readonly bytes_at_rest: number;
  /** of that what is padding, over the ranks that share one copy together. */
  readonly bytes_padding: number;
  /** ranks that share one copy. */
  readonly shard_size: number;
  /** copies. */
  readonly replicate_size: number;
  /** `true`, `false`, or the number of ranks that share it from forward to backward. */
  readonly reshard_after_forward: string;
  /** of the all-gather and of forward and backward, such as `bfloat16`. */
  readonly compute_dtype: string;
  /** of gradients on their way. */
  readonly reduce_dtype: string;
  /** whether its shards stay in host memory between uses. */
  readonly offload: boolean;
}

/** Where the units are on ranks that have them alike. */
export interface UnitStates {
  /** these ranks. */
  readonly ranks: readonly number[];
  /**
   * one digit a unit, in the order of `State.units`: its number in `UNIT_STATES` of the
   * dashboard (0 sharded, 1 all-gather in flight, 2 unsharded, 3 reducing).
   */
  readonly states: string;
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

/** What the ranks were asked and have not ended. */
export interface RequestState {
  /** such as `%fsdp step 40`, or `a cell`. */
  readonly line: string;
  /** whether they stand still inside it. */
  readonly is_stopped: boolean;
  /** where they stand, a sentence; empty: they do not. */
  readonly stop: string;
  /** because of what, such as `breakpoint 1: all_gather:blocks.2`. */
  readonly reasons: readonly string[];
  /** whether the notebook is free meanwhile. */
  readonly in_background: boolean;
  /** steps that all ranks have finished; 0 if it is no `step`. */
  readonly steps_done: number;
  /** steps asked for; 0 if it is no `step`. */
  readonly steps_total: number;
}

/** How training goes. */
export interface TrainingSummary {
  /** number of the newest step that a rank has begun, -1 before the first. */
  readonly step: number;
  /** mean over the ranks, of the newest step that has one. */
  readonly loss: number | "nan" | "inf" | "-inf" | null;
  /** number of that step, -1 if none has a loss. */
  readonly loss_step: number;
  /** of the newest step that all ranks have finished, on the slowest of them. */
  readonly steps_per_s: number | null;
  /** of all ranks together, where they log `tokens`. */
  readonly tokens_per_s: number | null;
}

/** The result of the last request, from any caller. */
export interface LastResult {
  /** number of requests that have ended; a new value means a new result. */
  readonly count: number;
  /** name of the request, such as `%fsdp step 40`, or `a cell`. */
  readonly line: string;
  /** its result or its error. */
  readonly text: string;
  /** whether it failed, was cancelled, or its report has a problem, such as a loss that is NaN. */
  readonly is_error: boolean;
}

/** How everything is. */
export interface State {
  readonly word: "state";
  /** of the question. */
  readonly number: number;
  /** whose ranks they are. */
  readonly cluster: ClusterState;
  /** one entry a rank, by number; none when none run. */
  readonly ranks: readonly RankState[];
  /** those that are not rank 0's. */
  readonly clocks: readonly ClockState[];
  /** of all models that are sharded now, from the top of each; None: as they were told last. */
  readonly units: readonly UnitInfo[] | null;
  /** where these units are. */
  readonly unit_states: readonly UnitStates[];
  /** in the order they were added, but for that of `step --until`. */
  readonly breakpoints: readonly BreakpointState[];
  /** what is under way; None: nothing is. */
  readonly request: RequestState | null;
  /** how training goes. */
  readonly training: TrainingSummary;
  /** how the last request ended; None: none has yet. */
  readonly ended: LastResult | null;
  /** whether there is something to draw and to export. */
  readonly is_recorded: boolean;
  /** name of the file that is shown; empty: what ranks recorded. */
  readonly record: string;
  /** what there is to see, or what to do first, a sentence; empty while ranks train. */
  readonly said: string;
}

/** A class of modules that `wrap` may name. */
export interface WrapClass {
  /** of the class. */
  readonly name: string;
  /** modules of it inside the model. */
  readonly count: number;
  /** of the parameters of all of them together, in elements. */
  readonly num_elements: number;
}

/**
 * How a model is sharded, in the words that `reshard` takes; for what only the other API has,
 * what is like it.
 */
export interface ModelPolicy {
  /** what it is sharded with. */
  readonly api: "fully_shard" | "classic";
  /** of the classic API; empty: its units differ, or it has nothing like what there is. */
  readonly strategy: "full" | "grad" | "none" | "hybrid" | "hybrid2" | "";
  /** whether optimizers have pieces of the parameters; else, with the classic API, flat ones. */
  readonly orig_params: boolean;
  /** classes whose modules are units, the model itself left out. */
  readonly wrap: readonly string[];
  /** such as `4`, or `2x2` for two copies; empty: its units differ. */
  readonly mesh: string;
  /** of `fully_shard`: `auto`, `true`, `false` or a number; empty: its units differ. */
  readonly reshard_after_forward: string | number;
  /**
   * such as `bf16,reduce=fp32`, or `off`; empty: its units differ, or there are no words for
   * it.
   */
  readonly mp: string;
  /** whether shards stay in host memory; None: only those of some units. */
  readonly offload: boolean | null;
  /** units gathered ahead, as a command asked; 0: the engine's own order. */
  readonly prefetch: number;
}

/** A model that the ranks' cells have made, as the first rank that has it describes it. */
export interface Model {
  /** its variable. */
  readonly name: string;
  /** of its class. */
  readonly class_name: string;
  /** whether it is sharded. */
  readonly is_sharded: boolean;
  /** parameters (tensors). */
  readonly num_params: number;
  /** of all parameters, in elements. */
  readonly num_elements: number;
  /** of all parameters in full. */
  readonly num_bytes: number;
  /** that `wrap` may name, by the most elements first. */
  readonly classes: readonly WrapClass[];
  /** those that `shard` takes if none is named. */
  readonly suggested: readonly string[];
  /** how it is sharded; None: it is not. */
  readonly policy: ModelPolicy | null;
  /** its units, by the numbers that they have in a trace. */
  readonly units: readonly number[];
  /** that have it; a model that is not on all of them cannot be sharded. */
  readonly ranks: readonly number[];
}

/** The models on the ranks. */
export interface Models {
  readonly word: "models";
  /** of the question. */
  readonly number: number;
  /** by name. */
  readonly models: readonly Model[];
  /** whether all ranks have a `train_step`. */
  readonly has_step: boolean;
  /** why there is none and what to do, a sentence; empty if there is one. */
  readonly text: string;
}

/** What ranks would hold between steps of training with Adam, in bytes. */
export interface RestPreview {
  /** that hold equally much. */
  readonly ranks: readonly number[];
  /** their shards, padding included. */
  readonly params: number;
  /** of the gradients. */
  readonly grads: number;
  /** of Adam's state. */
  readonly adam: number;
}

/** The collectives of one kind of one training step, on each rank. */
export interface SentPreview {
  /** in words, such as `all-gather`. */
  readonly kind: string;
  /** that take part in each. */
  readonly num_ranks: number;
  /** how many. */
  readonly calls: number;
  /** their payloads together. */
  readonly num_bytes: number;
  /** what one rank sends for them, on a ring. */
  readonly sent_bytes: number;
}

/** What a command would come to; nothing was done. */
export interface Preview {
  readonly word: "preview";
  /** of the question. */
  readonly number: number;
  /** what one could have typed. */
  readonly line: string;
  /** why it cannot be done, a sentence; all that follows is empty then. Empty: it can. */
  readonly problem: string;
  /** names of the units that there would be, `(root)` for the root's own. */
  readonly units: readonly string[];
  /** of the whole model. */
  readonly bytes_unsharded: number;
  /** of those of its parameters that would be in no unit, which each rank keeps in full. */
  readonly bytes_ignored: number;
  /**
   * what each rank would hold, those parameters included; of gradients and Adam's state what
   * units have.
   */
  readonly at_rest: readonly RestPreview[];
  /** the collectives of one step of one forward and one backward. */
  readonly sent: readonly SentPreview[];
  /** what one rank sends for all of them. */
  readonly sent_bytes: number;
}

/** A parameter of a unit. */
export interface ParamInfo {
  /** name relative to the root of its model, which `inspect` takes. */
  readonly fqn: string;
  /** in elements, whole. */
  readonly shape: readonly number[];
  /** such as `float32`. */
  readonly dtype: string;
  /** in full. */
  readonly bytes_unsharded: number;
  /**
   * what each rank keeps of it, padding included; of one in a flat parameter, the most that one
   * does.
   */
  readonly bytes_at_rest: number;
  /**
   * rows of its shard dim that each of the ranks that share it holds; of one in a flat
   * parameter, elements.
   */
  readonly rows_per_rank: readonly number[];
  /** whether it takes a gradient. */
  readonly is_trainable: boolean;
  /** name of the flat parameter that it lies in; empty: none. */
  readonly flat: string;
}

/** The parameters of a unit. */
export interface Params {
  readonly word: "params";
  /** of the question. */
  readonly number: number;
  /** index of the unit. */
  readonly unit: number;
  /**
   * in its order, a flat one before those that lie in it; none if there is no such unit any
   * more.
   */
  readonly params: readonly ParamInfo[];
}

/** A command as a line. */
export interface CommandLine {
  readonly word: "line";
  /** of the question. */
  readonly number: number;
  /** what one could have typed, such as `%fsdp shard model --wrap Block`. */
  readonly line: string;
}

/** What a command said. */
export interface CommandOutput {
  readonly word: "said";
  /** of the question. */
  readonly number: number;
  /** what one could have typed; it is in the history of commands. */
  readonly line: string;
  /** what came of it, or its error; the first line says it in one sentence. */
  readonly text: string;
  /** whether it failed. */
  readonly is_error: boolean;
  /**
   * by MIME type what a cell would show of it: a figure, a table; none if it failed or there is
   * only the text.
   */
  readonly data: unknown;
}

/** A command that was asked for in this notebook. */
export interface PastCommand {
  /** what was typed, or could have been. */
  readonly line: string;
  /** who asked. */
  readonly source: "cell" | "panel";
  /** when, in seconds since 1970. */
  readonly t_s: number;
}

/** The commands of this notebook; `%fsdp history` shows the same. */
export interface CommandHistory {
  readonly word: "recalled";
  /** of the question. */
  readonly number: number;
  /** the oldest first. */
  readonly commands: readonly PastCommand[];
}

/** A question that has no answer. */
export interface Refused {
  readonly word: "refused";
  /** of the question; -1 if it has none that can be read. */
  readonly number: number;
  /** why, a sentence. */
  readonly text: string;
}

/** Start ranks. */
export interface Start {
  readonly word: "start";
  /** number of ranks (default 4) */
  readonly num_ranks?: number;
  /** device kind of the ranks (default auto) */
  readonly device?: "auto" | "cpu" | "cuda";
  /** IPython profile with the cluster's configuration (default: none) */
  readonly profile?: string | null;
  /**
   * ipyparallel launcher of the engines: ssh, slurm, mpi, ... (default: the profile's, else the
   * fast start on this machine)
   */
  readonly engines?: string;
  /** network interface between the hosts (default: that of the route between them) */
  readonly interface?: string;
}

/**
 * Use engines that are already running as ranks; engines that are ranks already keep their
 * variables.
 */
export interface Attach {
  readonly word: "attach";
  /** number of ranks (default: all) */
  readonly num_ranks?: number | null;
  /** IPython profile that the cluster was started with */
  readonly profile?: string | null;
  /** cluster of that profile */
  readonly cluster_id?: string;
  /** connection file for clients, instead of a profile */
  readonly file?: string;
  /** device kind of the ranks (default auto) */
  readonly device?: "auto" | "cpu" | "cuda";
  /** network interface between the hosts (default: that of the route between them) */
  readonly interface?: string;
  /** take control of ranks whose notebook is gone */
  readonly take?: boolean;
}

/** Show the ranks, the sharded models, and the size of the trace. */
export interface Status {
  readonly word: "status";
}

/**
 * Detach from attached ranks; they keep running, with their variables, and can be attached
 * again.
 */
export interface Detach {
  readonly word: "detach";
}

/** Stop the ranks; the trace is kept. */
export interface Stop {
  readonly word: "stop";
}

/** Show the ranks live and at any past event, with buttons to stop inside a step. */
export interface Dashboard {
  readonly word: "dashboard";
}

/** Shard a model with fully_shard or the classic wrapper, one unit per module of a class. */
export interface Shard {
  readonly word: "shard";
  /** module classes; each instance becomes a unit (default: chosen from the model) */
  readonly wrap?: readonly string[];
  /**
   * number of shard ranks, or replicas x shard ranks; hosts: one replica per host (default: one
   * replica)
   */
  readonly mesh?: number | string | readonly number[];
  /**
   * free full parameters after forward; auto: except the root's; K: reshard them over K ranks
   * (default: auto)
   */
  readonly reshard_after_forward?: string | number;
  /**
   * FSDP API; classic: FullyShardedDataParallel, one flat parameter per unit (default:
   * fully_shard)
   */
  readonly api?: "fully_shard" | "classic";
  /**
   * classic only: what is sharded; grad keeps full parameters until backward, hybrid2 does so
   * within a replica (default: full)
   */
  readonly strategy?: "full" | "grad" | "none" | "hybrid" | "hybrid2";
  /** variable of the model on the ranks, such as model */
  readonly model: string;
  /**
   * classic only: the optimizer has the rank's shard of each parameter, not the flat parameter
   * (default: no)
   */
  readonly orig_params?: boolean;
  /**
   * dtypes of compute, reduction and output: bf16, fp16, fp32, fp64; off: none, reduce=off:
   * none for reduction (default: off)
   */
  readonly mp?: string;
  /** keep shards in host memory (default: no) */
  readonly offload?: boolean;
  /** gather N units ahead, in module order; 0: the engine's own order (default: 0) */
  readonly prefetch?: number;
  /** parameters to leave unsharded, such as *.bias */
  readonly ignore?: readonly string[];
}

/**
 * Change the sharding of a model in place; optimizers keep their state. Options that are not
 * given stay unchanged, also those within `mp`, and so do the parameters that `shard` ignored.
 * A name such as `model.blocks.2` selects one unit: its `reshard_after_forward`, `mp` and
 * `offload` change, and no other unit does.
 */
export interface Reshard {
  readonly word: "reshard";
  /** module classes; each instance becomes a unit (default: unchanged) */
  readonly wrap?: readonly string[];
  /**
   * number of shard ranks, or replicas x shard ranks; hosts: one replica per host (default:
   * unchanged)
   */
  readonly mesh?: number | string | readonly number[];
  /**
   * free full parameters after forward; auto: except the root's; K: reshard them over K ranks
   * (default: unchanged)
   */
  readonly reshard_after_forward?: string | number;
  /**
   * FSDP API; classic: FullyShardedDataParallel, one flat parameter per unit (default:
   * unchanged)
   */
  readonly api?: "fully_shard" | "classic";
  /**
   * classic only: what is sharded; grad keeps full parameters until backward, hybrid2 does so
   * within a replica (default: unchanged)
   */
  readonly strategy?: "full" | "grad" | "none" | "hybrid" | "hybrid2";
  /**
   * variable of the model on the ranks, such as model, or one unit of it, such as
   * model.blocks.2
   */
  readonly model: string;
  /**
   * classic only: the optimizer has the rank's shard of each parameter, not the flat parameter
   * (default: unchanged)
   */
  readonly orig_params?: boolean | null;
  /**
   * dtypes of compute, reduction and output: bf16, fp16, fp32, fp64; off: none, reduce=off:
   * none for reduction (default: unchanged)
   */
  readonly mp?: string;
  /** keep shards in host memory (default: unchanged) */
  readonly offload?: boolean | null;
  /** gather N units ahead, in module order; 0: the engine's own order (default: unchanged) */
  readonly prefetch?: number | null;
}

/** Make a sharded model a plain module again, with the same values. */
export interface Unshard {
  readonly word: "unshard";
  /** variable of the model on the ranks, such as model */
  readonly model: string;
}

/** Train: call train_step() N times on every rank; a number that it returns is the loss. */
export interface Step {
  readonly word: "step";
  /** number of training steps (default 1) */
  readonly count?: number;
  /** step function (default train_step) */
  readonly fn?: string;
  /** stop once, before this event: EVENT[:UNIT] */
  readonly until?: string;
  /** run in the background: the notebook stays free (default: no) */
  readonly background?: boolean;
}

/** Stop all ranks at the same event of the running step. */
export interface Pause {
  readonly word: "pause";
}

/** Continue a stopped step to the next event, collective, unit or phase. */
export interface Next {
  readonly word: "next";
  /** where to stop next (default: event) */
  readonly what?: "event" | "collective" | "unit" | "phase";
}

/** Continue a stopped step, in the background if it was started there. */
export interface Continue {
  readonly word: "continue";
  /** wait for the step, even if it was started with --background (default: no) */
  readonly foreground?: boolean;
  /** run the rest in the background (default: no) */
  readonly background?: boolean;
}

/** Abort the running or stopped step or cell; the ranks are ready again afterwards. */
export interface Abort {
  readonly word: "abort";
}

/** Show where every rank is, and since when. */
export interface Where {
  readonly word: "where";
  /** also the stacks of each rank's Python threads (default: no) */
  readonly stacks?: boolean;
}

/**
 * Add, list or clear breakpoints, or turn them on and off; ranks stop before each matching
 * event.
 */
export interface Break {
  readonly word: "break";
  /** what to do */
  readonly action: "add" | "list" | "clear" | "on" | "off";
  /** an event such as backward:blocks.2, or a breakpoint number */
  readonly event?: string;
  /** stop only this rank (default: all) */
  readonly rank?: number | null;
  /** a condition such as 'num_bytes > 1e6' (default: always) */
  readonly when?: string | null;
}

/** Show each stopped rank's shard of a parameter, in a table. */
export interface Inspect {
  readonly word: "inspect";
  /** a parameter, such as blocks.2.mlp.0.weight */
  readonly fqn: string;
}

/** Evaluate an expression inside the stopped step, with the variables of its active functions. */
export interface Evaluate {
  readonly word: "eval";
  /**
   * a Python expression: the rest of the line as typed; after --, no part of it is read as a
   * flag
   */
  readonly expr: string;
  /** ranks that evaluate it, such as 1,3 or 0-2 (default: all) */
  readonly ranks?: readonly number[];
  /** look names up in the N-th active function and its callers; 0: the innermost (default 0) */
  readonly frame?: number;
}

/** Show the trace as of N events ago, 0: the newest event; the ranks' work is not undone. */
export interface Back {
  readonly word: "back";
  /** number of events to go back; 0: to the newest (default 1) */
  readonly n?: number;
}

/** Compare a step with the same step of an unsharded copy; the training state is not changed. */
export interface Verify {
  readonly word: "verify";
  /** sharded model (default: the only one) */
  readonly model?: string;
  /** step function (default train_step) */
  readonly fn?: string;
}

/** Draw which rows of which parameter lie on which rank. */
export interface DrawLayout {
  readonly word: "layout";
  /** draw this unit alone: a name, a pattern such as blocks.*, or (root) (default: all) */
  readonly unit?: string | null;
  /**
   * draw parameters that are alike in all but a number (blocks.0-3) as one bar (default: only
   * if many)
   */
  readonly fold?: boolean | null;
  /** use sizes and colours for a projector */
  readonly talk?: boolean | null;
}

/** Draw bytes by class over time, and name the peak. */
export interface DrawMemory {
  readonly word: "memory";
  /** the last step to show (default: the newest) */
  readonly step?: number | null;
  /** how many steps, up to that one */
  readonly steps?: number | null;
  /** show this rank alone (default: one rank of each group of alike ones) */
  readonly rank?: number | null;
  /** show the memory of the whole process as well, where it was sampled */
  readonly process?: boolean | null;
  /** use sizes and colours for a projector */
  readonly talk?: boolean | null;
}

/** Draw compute, collectives and waits of a step, per rank. */
export interface DrawTimeline {
  readonly word: "timeline";
  /** the last step to show (default: the newest) */
  readonly step?: number | null;
  /** how many steps, up to that one */
  readonly steps?: number | null;
  /** show this rank alone (default: all of them, alike ones together if they are many) */
  readonly rank?: number | null;
  /** use sizes and colours for a projector */
  readonly talk?: boolean | null;
  /** show the whole run, live, to pan and zoom */
  readonly canvas?: boolean | null;
}

/** Draw which unit is sharded, gathering, unsharded or reducing, over time. */
export interface DrawStates {
  readonly word: "states";
  /** the last step to show (default: the newest) */
  readonly step?: number | null;
  /** how many steps, up to that one */
  readonly steps?: number | null;
  /** the rank to show (default: one of the largest group of alike ones) */
  readonly rank?: number | null;
  /** draw this unit alone: a name, a pattern such as blocks.*, or (root) (default: all) */
  readonly unit?: string | null;
  /** use sizes and colours for a projector */
  readonly talk?: boolean | null;
}

/**
 * Count collectives of a step per unit: calls, bytes, also between hosts, and time, beside what
 * a formula says.
 */
export interface DrawComms {
  readonly word: "comms";
  /** which step (default: the last one that ended) */
  readonly step?: number | null;
  /**
   * count those of this unit alone: a name, a pattern such as blocks.*, or (root) (default:
   * all)
   */
  readonly unit?: string | null;
  /** use sizes and colours for a projector */
  readonly talk?: boolean | null;
}

/** Draw loss, step time and what else is logged. */
export interface DrawTraining {
  readonly word: "training";
  /** use sizes and colours for a projector */
  readonly talk?: boolean | null;
}

/** Show what changed from one trace, or some of its steps, to another. */
export interface Compare {
  readonly word: "compare";
  /**
   * a trace file, or last: the trace so far; with steps: last:3..5, or last:-3.. (the newest
   * three); 3..5 means last:3..5
   */
  readonly a: string;
  /** the trace to compare A with, in the same form */
  readonly b: string;
  /** compare this rank (default: the one whose peak differs most) */
  readonly rank?: number | null;
  /** use sizes and colours for a projector */
  readonly talk?: boolean;
}

/**
 * Write the trace to a file: .trace to open again, .json for Perfetto, .html for a page that
 * replays it.
 */
export interface Export {
  readonly word: "export";
  /** output file; its suffix selects the format */
  readonly path: string;
  /** only these steps, such as 7, 3..5, 400.. or --steps=-3.. (the newest three) */
  readonly steps?: string;
}

/** Show a trace file without ranks: every view, the dashboard, compare and export. */
export interface Open {
  readonly word: "open";
  /** a trace file written by export */
  readonly path: string;
}

/** List the commands of this notebook and its panel, as lines to copy. */
export interface History {
  readonly word: "history";
  /** only the newest N; 0: all (default 0) */
  readonly n?: number;
}

/** List the commands, or explain one of them. */
export interface Help {
  readonly word: "help";
  /** default: all commands */
  readonly topic?: string;
}

export type Question =
  | Hello
  | GetState
  | FindModels
  | PreviewCommand
  | FindParams
  | FormatCommand
  | RunCommand
  | GetHistory;

export type Answer =
  | Welcome
  | State
  | Models
  | Preview
  | Params
  | CommandLine
  | CommandOutput
  | CommandHistory
  | Refused;

export type Command =
  | Start
  | Attach
  | Status
  | Detach
  | Stop
  | Dashboard
  | Shard
  | Reshard
  | Unshard
  | Step
  | Pause
  | Next
  | Continue
  | Abort
  | Where
  | Break
  | Inspect
  | Evaluate
  | Back
  | Verify
  | DrawLayout
  | DrawMemory
  | DrawTimeline
  | DrawStates
  | DrawComms
  | DrawTraining
  | Compare
  | Export
  | Open
  | History
  | Help;
