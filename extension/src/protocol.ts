// Made of workbench/live/messages.py, which describes them, and the words of %fsdp by: python -m workbench.cli.generate_front_end

export const TARGET = "workbench";
export const VERSION = 3;
export const DEVICES = ["auto", "cpu", "cuda"];
export const STRATEGIES = {"full": "FULL_SHARD", "grad": "SHARD_GRAD_OP", "none": "NO_SHARD", "hybrid": "HYBRID_SHARD", "hybrid2": "_HYBRID_SHARD_ZERO2"};
export const HYBRID = ["hybrid", "hybrid2"];
export const EXAMPLE = "%%fsdp\n# A small GPT that learns to predict characters. Run this cell, then %fsdp shard model, then %fsdp step 5.\nimport torch\nfrom workbench.zoo import GPT, GPTConfig, load_text, next_token_loss, rank_generator, sample_batch\n\ntext = load_text()\ntorch.manual_seed(0)  # the same model on every rank\nmodel = GPT(GPTConfig(vocab_size=len(text.characters), num_blocks=4, width=128, max_tokens=64)).to(device)\noptimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)\ngenerator = rank_generator(seed=0, rank=rank)  # other samples on every rank\n\n\ndef train_step():\n    inputs, targets = sample_batch(text.train, num_sequences=8, num_tokens=64, generator=generator)\n    loss = next_token_loss(model(inputs.to(device)), targets.to(device))\n    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n    return loss.item()\n";
export const CHECK_MIME = "application/vnd.fsdp-workbench.check+json";
export const COURSE_FOLDER = "fsdp-course";
export const FAULT_KINDS = {"straggler": "rank R sleeps MS ms in every forward of unit UNIT", "skip-collective": "rank R leaves out an all-reduce that all other ranks issue before each forward", "wrong-order": "rank R gathers unit UNIT before the units that all other ranks gather first", "uneven-batches": "rank R has no more batches: its train_step returns at once", "wrong-scale": "gradients are summed over the ranks instead of averaged", "partial-norm": "each rank clips its gradients by the norm of its own rows instead of the norm of all rows", "no-sync-left-on": "gradient synchronisation of unit UNIT stays off: its gradients are never reduced", "stale-optimizer": "the optimizer holds the parameters from before sharding, so its steps do not train the model", "untouched-buffer": "unit UNIT has a buffer that to_empty allocated and nothing has written since", "same-data": "the DataLoaders draw the same rows on every rank: a RandomSampler instead of a DistributedSampler", "bf16-master": "parameters and optimizer state are bfloat16, without a float32 copy", "drifting-replica": "rank R has other values of unit UNIT than the other replicas", "nan": "the output of unit UNIT is NaN on rank R", "kill": "rank R is killed (SIGKILL) in the next forward of unit UNIT", "oom": "rank R runs out of memory in every forward of unit UNIT", "disk-full": "the disk of rank R is full when it saves a checkpoint", "kill-during-save": "rank R is killed (SIGKILL) while it writes a checkpoint"};
export const VIEWS = {"layout": "draw which rank holds which rows of each parameter", "memory": "draw bytes by class over time, and name the peak", "timeline": "draw compute, collectives and waits of a step, per rank", "states": "draw which unit is sharded, gathering, unsharded or reducing, over time", "comms": "count collectives of a step per unit: calls, bytes (also between hosts) and time, next to the expected numbers", "training": "draw loss, step time and other logged metrics"};

export interface PanelMessage { readonly number: number; }

export interface Hello extends PanelMessage {
  readonly word: "hello";
  readonly version: number;
  readonly extension: string;
}

export interface GetState extends PanelMessage { readonly word: "look"; readonly wait?: boolean; }

export interface FindModels extends PanelMessage { readonly word: "find models"; }

export interface PreviewCommand extends PanelMessage {
  readonly word: "try";
  readonly command: Command;
}

export interface FindParams extends PanelMessage {
  readonly word: "find params";
  readonly unit: number;
}

export interface FormatCommand extends PanelMessage {
  readonly word: "spell";
  readonly command: Command | string;
}

export interface RunCommand extends PanelMessage {
  readonly word: "do";
  readonly command: Command | string;
}

export interface GetHistory extends PanelMessage { readonly word: "recall"; }

export interface GetOutput extends PanelMessage {
  readonly word: "output";
  readonly rank?: number | null;
}

export interface ViewMessage { readonly view: string; }

export interface AskFeed extends ViewMessage { readonly word: "feed"; readonly wait: boolean; }

export interface TraceMessage extends ViewMessage { readonly number: number; }

export interface AskAt extends TraceMessage { readonly word: "at"; readonly t_us: number; }

export interface AskBeside extends TraceMessage {
  readonly word: "beside";
  readonly rank: number;
  readonly seq: number;
  readonly by: number;
}

export interface AskWindow extends TraceMessage {
  readonly word: "window";
  readonly from_us: number;
  readonly to_us: number;
}

export interface RunButton extends ViewMessage {
  readonly word: "press";
  readonly button: string;
  readonly argument: string;
}

export interface CloseView extends ViewMessage { readonly word: "bye"; }

export interface InitialState {
  readonly buttons: readonly string[];
  readonly panels: readonly ("ranks" | "memory" | "units" | "timeline")[];
  readonly sizes: readonly string[];
  readonly faults: readonly string[];
}

export interface Welcome extends PanelMessage {
  readonly word: "welcome";
  readonly version: number;
  readonly workbench: string;
  readonly dashboard: InitialState;
  readonly problem: string;
}

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
  readonly one_job: string;
  readonly cores: number;
}

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

export interface ClockState {
  readonly ranks: readonly number[];
  readonly error_ns: number;
  readonly text: string;
}

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

export interface UnitStates { readonly ranks: readonly number[]; readonly states: string; }

export interface BreakpointState {
  readonly id: number;
  readonly text: string;
  readonly is_on: boolean;
}

export interface RequestState {
  readonly line: string;
  readonly is_stopped: boolean;
  readonly stop: string;
  readonly reasons: readonly string[];
  readonly in_background: boolean;
  readonly steps_done: number;
  readonly steps_total: number;
}

export interface TrainingSummary {
  readonly step: number;
  readonly loss: number | "nan" | "inf" | "-inf" | null;
  readonly loss_step: number;
  readonly steps_per_s: number | null;
  readonly tokens_per_s: number | null;
}

export interface LastResult {
  readonly count: number;
  readonly line: string;
  readonly text: string;
  readonly is_error: boolean;
}

export interface State extends PanelMessage {
  readonly word: "state";
  readonly cluster: ClusterState;
  readonly ranks: readonly RankState[];
  readonly clocks: readonly ClockState[];
  readonly units: readonly UnitInfo[] | null;
  readonly unit_states: readonly UnitStates[];
  readonly breakpoints: readonly BreakpointState[];
  readonly request: RequestState | null;
  readonly training: TrainingSummary;
  readonly ended: LastResult | null;
  readonly output: number;
  readonly is_recorded: boolean;
  readonly record: string;
  readonly said: string;
  readonly fault: string;
}

export interface WrapClass {
  readonly name: string;
  readonly count: number;
  readonly num_elements: number;
}

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
  readonly never_cleared: readonly string[];
  readonly has_optimizer: boolean;
}

export interface Model extends ModelInfo { readonly ranks: readonly number[]; }

export interface Models extends PanelMessage {
  readonly word: "models";
  readonly models: readonly Model[];
  readonly has_step: boolean;
  readonly text: string;
}

export interface AtRest { readonly params: number; readonly grads: number; readonly adam: number; }

export interface RestPreview extends AtRest { readonly ranks: readonly number[]; }

export interface SentPreview {
  readonly kind: string;
  readonly num_ranks: number;
  readonly calls: number;
  readonly num_bytes: number;
  readonly sent_bytes: number;
}

export interface Preview extends PanelMessage {
  readonly word: "preview";
  readonly line: string;
  readonly problem: string;
  readonly units: readonly string[];
  readonly bytes_unsharded: number;
  readonly bytes_ignored: number;
  readonly at_rest: readonly RestPreview[];
  readonly sent: readonly SentPreview[];
  readonly sent_bytes: number;
}

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

export interface Params extends PanelMessage {
  readonly word: "params";
  readonly unit: number;
  readonly params: readonly ParamInfo[];
}

export interface CommandLine extends PanelMessage { readonly word: "line"; readonly line: string; }

export interface CommandOutput extends PanelMessage {
  readonly word: "said";
  readonly line: string;
  readonly text: string;
  readonly is_error: boolean;
  readonly data: unknown;
}

export interface PastCommand {
  readonly line: string;
  readonly source: "cell" | "panel" | "tool";
  readonly t_s: number;
  readonly failed: boolean;
}

export interface CommandHistory extends PanelMessage {
  readonly word: "recalled";
  readonly commands: readonly PastCommand[];
}

export interface OutputLine {
  readonly ranks: readonly number[];
  readonly kind: "stdout" | "stderr" | "display" | "notice" | "error";
  readonly text: string;
  readonly step: number | null;
  readonly t_s: number;
}

export interface OutputTail extends PanelMessage {
  readonly word: "lines";
  readonly lines: readonly OutputLine[];
  readonly is_cut: boolean;
}

export interface Refused {
  readonly word: "refused";
  readonly number: number;
  readonly text: string;
  readonly view: string;
}

export interface OpenSpan {
  readonly track: number;
  readonly kind: 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | 11 | 12 | 13 | 14 | 15 | 16 | 17 | 18 | 19 | 20 | 21 | 22 | 23 | 24 | 25 | 26 | 27 | 28 | 29;
  readonly unit: number;
  readonly start: number;
  readonly bytes: number;
}

export interface Counts {
  readonly spans: number;
  readonly memory: number;
  readonly states: number;
  readonly steps: number;
}

export interface RankHealth {
  readonly label: string;
  readonly ranks: readonly number[];
  readonly state: "held" | "waiting" | "running" | "starting" | "idle" | "no answer" | "gone";
  readonly where: string;
}

export interface RunStatus {
  readonly word: "training" | "stuck" | "stopped" | "idle" | "recorded" | "over" | "dead" | "empty";
  readonly why: string;
  readonly can_go_on: boolean;
  readonly fault: string;
}

export interface RanksAt {
  readonly ranks: readonly number[];
  readonly label: string;
  readonly doing: string;
  readonly units: readonly (0 | 1 | 2 | 3)[];
  readonly bytes: readonly number[];
  readonly in_use: number;
}

export interface Moment {
  readonly t_us: number;
  readonly rank: number;
  readonly seq: number;
  readonly step: number;
  readonly event: string;
  readonly ranks: readonly RanksAt[];
}

export interface PeakInfo {
  readonly num_bytes: number;
  readonly t_us: number;
  readonly step: number;
  readonly text: string;
}

export interface Costs {
  readonly num_steps: number;
  readonly ms: number;
  readonly exposed: number;
  readonly peak_bytes: number;
}

export interface KnobEffect {
  readonly what: string;
  readonly at_step: number;
  readonly before: Costs;
  readonly after: Costs;
}

export interface MovedCursor { readonly t_us: number; readonly moment: Moment | null; }

export interface FeedUpdate extends ViewMessage {
  readonly word: "feed";
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

export interface MomentReply extends TraceMessage {
  readonly word: "moment";
  readonly moment: Moment | null;
}

export interface WindowDetail extends TraceMessage {
  readonly word: "window";
  readonly from_us: number;
  readonly to_us: number;
  readonly exact: boolean;
  readonly counts: Counts;
}

export interface ButtonResult extends ViewMessage {
  readonly word: "pressed";
  readonly button: string;
  readonly text: string;
}

export interface Start {
  readonly word: "start";
  readonly num_ranks?: number;
  readonly device?: "auto" | "cpu" | "cuda";
  readonly profile?: string | null;
  readonly engines?: string;
  readonly interface?: string;
  readonly start_timeout_s?: number;
}

export interface Attach {
  readonly word: "attach";
  readonly num_ranks?: number | null;
  readonly profile?: string | null;
  readonly cluster_id?: string;
  readonly file?: string;
  readonly device?: "auto" | "cpu" | "cuda";
  readonly interface?: string;
  readonly take?: boolean;
  readonly look?: boolean;
}

export interface Status { readonly word: "status"; }

export interface Detach { readonly word: "detach"; }

export interface Stop { readonly word: "stop"; }

export interface Heal { readonly word: "heal"; }

export interface Dashboard { readonly word: "dashboard"; }

export interface Sharding {
  readonly wrap?: readonly string[];
  readonly mesh?: number | string | readonly number[];
  readonly reshard_after_forward?: string | number;
  readonly api?: string;
  readonly strategy?: string;
}

export interface Shard extends Sharding {
  readonly word: "shard";
  readonly model: string;
  readonly engine?: "workbench" | "torch";
  readonly orig_params?: boolean;
  readonly mp?: string;
  readonly offload?: boolean;
  readonly prefetch?: number;
  readonly ignore?: readonly string[];
}

export interface Reshard extends Sharding {
  readonly word: "reshard";
  readonly model: string;
  readonly orig_params?: boolean | null;
  readonly mp?: string;
  readonly offload?: boolean | null;
  readonly prefetch?: number | null;
}

export interface Plan extends Omit<Reshard, "word"> {
  readonly word: "plan";
  readonly ranks?: number;
  readonly hosts?: number | null;
  readonly device?: string;
  readonly fit?: string;
  readonly checkpoint?: readonly string[];
  readonly fn?: string;
  readonly out?: string;
}

export interface Unshard { readonly word: "unshard"; readonly model: string; }

export interface Lint { readonly word: "lint"; readonly model?: string; }

export interface Step {
  readonly word: "step";
  readonly count?: number;
  readonly fn?: string;
  readonly until?: string;
  readonly background?: boolean;
  readonly save?: string;
  readonly every?: number;
  readonly snapshot?: number;
}

export interface Snapshot { readonly word: "snapshot"; }

export interface Run {
  readonly word: "run";
  readonly script: string;
  readonly args?: readonly string[];
  readonly module?: boolean;
  readonly until?: string;
  readonly background?: boolean;
}

export interface Save { readonly word: "save"; readonly folder: string; }

export interface Load { readonly word: "load"; readonly folder: string; }

export interface Pause { readonly word: "pause"; }

export interface Next {
  readonly word: "next";
  readonly what?: "event" | "collective" | "unit" | "phase";
}

export interface Continue {
  readonly word: "continue";
  readonly foreground?: boolean;
  readonly background?: boolean;
}

export interface Abort { readonly word: "abort"; }

export interface Where { readonly word: "where"; readonly stacks?: boolean; }

export interface Break {
  readonly word: "break";
  readonly action: "add" | "list" | "clear" | "on" | "off";
  readonly event?: string;
  readonly rank?: number | null;
  readonly when?: string | null;
}

export interface Inspect { readonly word: "inspect"; readonly fqn: string; }

export interface Evaluate {
  readonly word: "eval";
  readonly expr: string;
  readonly ranks?: readonly number[];
  readonly frame?: number;
}

export interface Back { readonly word: "back"; readonly n?: number; }

export interface Verify {
  readonly word: "verify";
  readonly model?: string;
  readonly fn?: string;
  readonly repeat?: boolean;
  readonly resume?: string;
}

export interface InjectFault {
  readonly word: "fault";
  readonly name: string;
  readonly rank?: number | null;
  readonly ms?: number;
  readonly unit?: string;
  readonly seed?: number;
}

export interface Faults { readonly word: "faults"; }

export interface Explain {
  readonly word: "explain";
  readonly subject?: string;
  readonly which?: string;
  readonly step?: number | null;
}

export interface DrawLayout {
  readonly word: "layout";
  readonly unit?: string | null;
  readonly fold?: boolean | null;
  readonly talk?: boolean | null;
}

export interface DrawMemory {
  readonly word: "memory";
  readonly step?: number | null;
  readonly steps?: number | null;
  readonly rank?: number | null;
  readonly process?: boolean | null;
  readonly by?: string | null;
  readonly talk?: boolean | null;
}

export interface DrawTimeline {
  readonly word: "timeline";
  readonly step?: number | null;
  readonly steps?: number | null;
  readonly rank?: number | null;
  readonly talk?: boolean | null;
  readonly canvas?: boolean | null;
}

export interface DrawStates {
  readonly word: "states";
  readonly step?: number | null;
  readonly steps?: number | null;
  readonly rank?: number | null;
  readonly unit?: string | null;
  readonly talk?: boolean | null;
}

export interface DrawComms {
  readonly word: "comms";
  readonly step?: number | null;
  readonly unit?: string | null;
  readonly talk?: boolean | null;
}

export interface DrawTraining { readonly word: "training"; readonly talk?: boolean | null; }

export interface Compare {
  readonly word: "compare";
  readonly a?: string;
  readonly b?: string;
  readonly rank?: number | null;
  readonly talk?: boolean;
}

export interface Export {
  readonly word: "export";
  readonly path: string;
  readonly steps?: string;
  readonly engine?: "workbench" | "torch";
}

export interface Open { readonly word: "open"; readonly path: string; }

export interface History { readonly word: "history"; readonly n?: number; }

export interface ShowOutput {
  readonly word: "output";
  readonly rank?: number | null;
  readonly lines?: number;
}

export interface Example { readonly word: "example"; }

export interface Help { readonly word: "help"; readonly topic?: string; }

export type PanelQuestion =
  | Hello | GetState | FindModels | PreviewCommand | FindParams | FormatCommand | RunCommand
  | GetHistory | GetOutput;

export type PanelAnswer =
  | Welcome | State | Models | Preview | Params | CommandLine | CommandOutput | CommandHistory
  | OutputTail | Refused;

export type ViewQuestion =
  | AskFeed | AskAt | AskBeside | AskWindow | RunButton | CloseView;

export type ViewAnswer =
  | FeedUpdate | MomentReply | WindowDetail | ButtonResult | Refused;

export type Command =
  | Start | Attach | Status | Detach | Stop | Heal | Dashboard | Shard | Reshard | Plan | Unshard
  | Lint | Step | Snapshot | Run | Save | Load | Pause | Next | Continue | Abort | Where | Break
  | Inspect | Evaluate | Back | Verify | InjectFault | Faults | Explain | DrawLayout | DrawMemory
  | DrawTimeline | DrawStates | DrawComms | DrawTraining | Compare | Export | Open | History
  | ShowOutput | Example | Help;

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
