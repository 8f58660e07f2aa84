"""The right verdict on each script in ``scripts``, in plain terms.

The verdicts come from the scripts alone, and not from the rules of the tool; they use none of its words. A line
of a script with the comment ``# <- here`` is one that a verdict should name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
HERE = "# <- here"
CPP = (2, 14)  # older torch does not see collectives that C++ issues: those of DDP, and functional ones


class Kind(StrEnum):
    """What kind of fault a script has, if any."""

    HANG = "hang"
    DEATH = "death"
    VERIFY = "verify"
    LINT = "lint"
    SOUND = "sound"


class Moment(StrEnum):
    """When a script is judged."""

    STANDING = "standing"  # its ranks wait for each other
    KILLED = "killed"  # a while after SIGKILL of all ranks
    TIMEOUT = "timeout"  # after the timeout of the group has ended it
    ENDED = "ended"  # after it has ended by itself
    RUNNING = "running"  # while it trains, several times
    NOTEBOOK = "notebook"  # on the ranks of a notebook
    CHECKED = "checked"  # by verify or lint


class Cause(Enum):
    """What is wrong with a run. The value is the meaning."""

    LEFT_OUT_COLLECTIVE = "The culprit goes past a collective that the other ranks of its group enter."
    ALONE_IN_COLLECTIVE = "The culprit enters a collective that the other ranks of its group do not."
    UNEVEN_STEPS = "The culprit makes more or fewer turns of the training loop than the others."
    BACKWARD_LEFT_OUT = "The culprit leaves out the backward of a batch or micro-batch."
    OTHER_PAYLOAD = "The culprit brings another shape, dtype or split sizes to a collective."
    OTHER_ROOT = "The culprit names another source for a broadcast."
    OTHER_ORDER = "The culprit enters the same collectives as the others, in another order."
    UNPAIRED_P2P = "A receive waits for a send that never comes, or the reverse."
    P2P_CYCLE = "Each of the culprits waits to receive before it sends."
    STUCK_OUTSIDE = "The culprit is in its own code: a sleep, a lock, a queue or a loop; the others wait for it."

    RAISED = "An exception ended the culprit first."
    EXITED = "The culprit left by an exit of its own."
    KILLED_BY_SIGNAL = "A signal ended the culprit."

    OTHER_HYPERPARAMETER = "The culprit's optimizer has another learning rate, weight decay or the like."
    GRADIENT_SCALE = "Gradients are larger or smaller by a factor than those of the unsharded model."
    EXTRA_OPTIMIZER_STEP = "The culprit steps its optimizer more often than the others."
    SYNC_LEFT_OFF = "Gradients are not reduced over the ranks, because synchronization was switched off."
    NOT_AVERAGED = "Some parameters are trained outside of what averages gradients, so ranks part."
    NOT_RESHUFFLED = "A sampler shuffles, and gives the same order in each epoch."
    SAME_DATA = "All ranks train on the same samples."
    OPTIMIZER_BEFORE_SHARDING = "The optimizer holds parameters that sharding has replaced."
    LOCAL_CLIP = "Gradients are clipped by the norm of a rank's shards, not by the norm of the model."
    NOT_FINITE = "The loss or the gradients of the culprit are not finite."
    UNEVEN_BATCH_SIZES = "Ranks take means over batches of different sizes."
    TIED_WEIGHTS_LOST = "Weights that were one parameter are two after sharding."
    BUFFERS_DIFFER = "Buffers, such as running statistics, differ among ranks."


@dataclass(frozen=True)
class Case:
    """One script and the right verdict on it.

    Any of ``causes`` is right, and any of ``culprits``, each a set of ranks that is named as a whole. No culprits mean
    that the fault is of all ranks alike, so that none must be singled out. ``words`` must all appear, and so must one
    of the marked lines if ``line`` is set. ``nearly`` are true, and not what a user needs: they count as partly right.
    All other ranks are victims, and wrong to accuse. ``wrong`` are causes that would mislead. ``abstain`` says why no
    verdict is acceptable as well. ``ends`` says who ends a hang before a user could: it is judged after that end.
    ``unreached`` says why the script does not come to some moments.
    """

    name: str
    ranks: int
    kind: Kind
    causes: tuple[Cause, ...] = ()
    culprits: tuple[frozenset[int], ...] = ()
    words: tuple[str, ...] = ()
    line: bool = True
    nearly: tuple[tuple[Cause, frozenset[int]], ...] = ()
    wrong: tuple[Cause, ...] = ()
    abstain: str = ""
    ends: str = ""
    unreached: Mapping[Moment, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    min_torch: tuple[int, int] = (2, 11)
    check: str = "where"  # a sound script may be one for verify or lint

    @property
    def script(self) -> Path:
        """The path of the script."""
        return SCRIPTS / f"{self.name}.py"

    @property
    def lines(self) -> tuple[int, ...]:
        """The numbers of the marked lines."""
        return tuple(i for i, line in enumerate(self.script.read_text().splitlines(), 1) if line.endswith(HERE))

    @property
    def victims(self) -> frozenset[int]:
        """The ranks that are wrong to accuse."""
        return frozenset(range(self.ranks)) - frozenset().union(*self.culprits)


_BETWEEN_CELLS = "a rank of a notebook ends after its script, and not within it, by SIGTERM"


def r(*ranks: int) -> frozenset[int]:
    return frozenset(ranks)


HANGS = (
    Case(
        "eval_metric_rank0",
        3,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE,),
        (r(0),),
        ("all_reduce",),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(1, 2)),),
        wrong=(Cause.STUCK_OUTSIDE, Cause.UNEVEN_STEPS),
    ),
    Case(
        "ckpt_full_tensor",
        4,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE,),
        (r(0),),
        ("all_gather",),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(1, 2, 3)), (Cause.LEFT_OUT_COLLECTIVE, r(0))),
        wrong=(Cause.STUCK_OUTSIDE,),
        min_torch=CPP,
    ),
    Case(
        "summon_rank0",
        3,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE,),
        (r(0),),
        nearly=((Cause.OTHER_ORDER, r(0)), (Cause.UNEVEN_STEPS, r(0))),
        wrong=(Cause.STUCK_OUTSIDE,),
    ),
    Case(
        "uneven_ddp_shards",
        3,
        Kind.HANG,
        (Cause.UNEVEN_STEPS,),
        (r(2),),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(2)), (Cause.ALONE_IN_COLLECTIVE, r(2))),
        wrong=(Cause.STUCK_OUTSIDE, Cause.OTHER_PAYLOAD),
        min_torch=CPP,
    ),
    Case(
        "round_robin_files",
        3,
        Kind.HANG,
        (Cause.UNEVEN_STEPS,),
        (r(0), r(1, 2)),
        nearly=((Cause.ALONE_IN_COLLECTIVE, r(0)), (Cause.LEFT_OUT_COLLECTIVE, r(1, 2))),
        wrong=(Cause.STUCK_OUTSIDE,),
    ),
    Case(
        "early_stop_local",
        4,
        Kind.HANG,
        (Cause.UNEVEN_STEPS,),
        (r(2),),
        nearly=((Cause.ALONE_IN_COLLECTIVE, r(2)), (Cause.LEFT_OUT_COLLECTIVE, r(2))),
        wrong=(Cause.STUCK_OUTSIDE,),
    ),
    Case(
        "skip_nan_batch",
        3,
        Kind.HANG,
        (Cause.BACKWARD_LEFT_OUT,),
        (r(1),),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(1)),),
        wrong=(Cause.STUCK_OUTSIDE, Cause.UNEVEN_STEPS),
        ends="the engine refuses the collective of another order",
    ),
    Case(
        "ddp_easy_samples",
        3,
        Kind.HANG,
        (Cause.BACKWARD_LEFT_OUT,),
        (r(2),),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(2)), (Cause.UNEVEN_STEPS, r(2)), (Cause.ALONE_IN_COLLECTIVE, r(2))),
        wrong=(Cause.STUCK_OUTSIDE,),
        min_torch=CPP,
    ),
    Case(
        "micro_batches_differ",
        3,
        Kind.HANG,
        (Cause.UNEVEN_STEPS, Cause.BACKWARD_LEFT_OUT),
        (r(0),),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(0)), (Cause.ALONE_IN_COLLECTIVE, r(0))),
        wrong=(Cause.STUCK_OUTSIDE,),
    ),
    Case(
        "label_histogram",
        3,
        Kind.HANG,
        (Cause.OTHER_PAYLOAD,),
        (r(1),),
        ("all_reduce", "4096", "2048"),
        wrong=(Cause.STUCK_OUTSIDE, Cause.LEFT_OUT_COLLECTIVE),
        ends="gloo aborts a rank that receives more bytes than it expects",
    ),
    Case(
        "gather_other_dtype",
        3,
        Kind.HANG,
        (Cause.OTHER_PAYLOAD,),
        (r(2),),
        ("all_gather", "float32", "float16"),
        wrong=(Cause.STUCK_OUTSIDE, Cause.LEFT_OUT_COLLECTIVE),
        min_torch=CPP,
        ends="gloo aborts a rank that receives more bytes than it expects",
    ),
    Case(
        "metric_groups_order",
        3,
        Kind.HANG,
        (Cause.OTHER_ORDER,),
        (r(2),),
        ("all_reduce",),
        nearly=((Cause.ALONE_IN_COLLECTIVE, r(2)), (Cause.LEFT_OUT_COLLECTIVE, r(2))),
        wrong=(Cause.STUCK_OUTSIDE,),
    ),
    Case(
        "stochastic_depth",
        3,
        Kind.HANG,
        (Cause.LEFT_OUT_COLLECTIVE,),
        (r(1),),
        ("blocks.2",),
        line=False,
        wrong=(Cause.STUCK_OUTSIDE, Cause.UNEVEN_STEPS),
    ),
    Case(
        "halo_recv_first",
        2,
        Kind.HANG,
        (Cause.P2P_CYCLE,),
        (r(0, 1),),
        ("recv",),
        nearly=((Cause.UNPAIRED_P2P, r(0, 1)),),
        wrong=(Cause.STUCK_OUTSIDE, Cause.LEFT_OUT_COLLECTIVE),
    ),
    Case(
        "stage_recv_too_many",
        3,
        Kind.HANG,
        (Cause.UNPAIRED_P2P,),
        (r(2),),
        ("recv",),
        nearly=((Cause.UNPAIRED_P2P, r(1, 2)), (Cause.LEFT_OUT_COLLECTIVE, r(2))),
        wrong=(Cause.STUCK_OUTSIDE,),
    ),
    Case(
        "hand_pipeline_tail",
        2,
        Kind.HANG,
        (Cause.UNPAIRED_P2P,),
        (r(0, 1), r(0), r(1)),
        ("12", "11"),  # messages from the first stage to the second
        wrong=(Cause.STUCK_OUTSIDE, Cause.LEFT_OUT_COLLECTIVE),
    ),
    Case(
        "remote_storage_stall",
        2,
        Kind.HANG,
        (Cause.STUCK_OUTSIDE,),
        (r(1),),
        wrong=(Cause.UNEVEN_STEPS,),
        unreached={Moment.TIMEOUT: "the rank that sleeps for an hour has no collective whose timeout would end it"},
    ),
    # which of them gets the lock first is by chance
    Case(
        "report_under_lock", 2, Kind.HANG, (Cause.STUCK_OUTSIDE,), (r(0), r(1)), ("lock",), wrong=(Cause.UNEVEN_STEPS,)
    ),
    Case(
        "timed_section",
        2,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE, Cause.LEFT_OUT_COLLECTIVE, Cause.BACKWARD_LEFT_OUT),
        (r(1),),
        ("KeyError", "bird"),
        wrong=(Cause.STUCK_OUTSIDE,),
        min_torch=CPP,
    ),
    Case("logger_lock", 3, Kind.HANG, (Cause.STUCK_OUTSIDE,), (r(2),), wrong=(Cause.UNEVEN_STEPS,)),
    Case(
        "rejection_sampling", 2, Kind.HANG, (Cause.STUCK_OUTSIDE,), (r(0),), wrong=(Cause.UNEVEN_STEPS,), min_torch=CPP
    ),
    Case("prefetch_thread_died", 2, Kind.HANG, (Cause.STUCK_OUTSIDE,), (r(1),), wrong=(Cause.UNEVEN_STEPS,)),
    Case(
        "first_rank_prepares",
        4,
        Kind.HANG,
        (Cause.LEFT_OUT_COLLECTIVE,),
        (r(0),),
        ("barrier",),
        nearly=((Cause.ALONE_IN_COLLECTIVE, r(0)), (Cause.ALONE_IN_COLLECTIVE, r(1, 2, 3))),
        wrong=(Cause.STUCK_OUTSIDE,),
        min_torch=CPP,
    ),
    Case(
        "clip_when_logging",
        3,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE,),
        (r(0),),
        ("all_reduce",),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(1, 2)),),
        wrong=(Cause.STUCK_OUTSIDE,),
        min_torch=CPP,
    ),
    Case(
        "best_rank_broadcast",
        3,
        Kind.HANG,
        (Cause.OTHER_ROOT,),
        (r(2),),
        ("broadcast",),
        nearly=((Cause.OTHER_PAYLOAD, r(2)),),
        wrong=(Cause.STUCK_OUTSIDE, Cause.LEFT_OUT_COLLECTIVE),
    ),
    Case(
        "swallowed_error",
        3,
        Kind.HANG,
        (Cause.BACKWARD_LEFT_OUT,),
        (r(1),),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(1)),),
        wrong=(Cause.STUCK_OUTSIDE, Cause.UNEVEN_STEPS),
        line=False,
    ),
    Case(
        "tp_probe_rank0",
        2,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE,),
        (r(0),),
        ("all_reduce",),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(1)), (Cause.LEFT_OUT_COLLECTIVE, r(0))),
        abstain="two ranks are in two collectives, and neither has a majority",
        wrong=(Cause.STUCK_OUTSIDE,),
        min_torch=CPP,
    ),
    Case(
        "accelerate_gather_main",
        3,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE,),
        (r(0),),
        ("all_gather",),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(1, 2)),),
        wrong=(Cause.STUCK_OUTSIDE,),
        min_torch=CPP,
    ),
    Case(
        "hf_generate_main",
        3,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE,),
        (r(0),),
        ("all_gather",),
        nearly=((Cause.LEFT_OUT_COLLECTIVE, r(1, 2)), (Cause.LEFT_OUT_COLLECTIVE, r(0))),
        wrong=(Cause.STUCK_OUTSIDE,),
    ),
    Case(
        "handler_barrier",
        3,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE,),
        (r(1),),
        ("barrier",),
        wrong=(Cause.STUCK_OUTSIDE, Cause.UNEVEN_STEPS),
    ),
    Case(
        "subgroup_left_out",
        4,
        Kind.HANG,
        (Cause.LEFT_OUT_COLLECTIVE,),
        (r(3),),
        ("all_reduce",),
        nearly=((Cause.ALONE_IN_COLLECTIVE, r(2)),),
        wrong=(Cause.STUCK_OUTSIDE,),
    ),
    Case(
        "optional_vision",
        2,
        Kind.HANG,
        (Cause.ALONE_IN_COLLECTIVE, Cause.LEFT_OUT_COLLECTIVE),
        (r(0), r(1)),
        ("vision",),
        nearly=((Cause.KILLED_BY_SIGNAL, r(0)), (Cause.KILLED_BY_SIGNAL, r(1))),
        wrong=(Cause.STUCK_OUTSIDE,),
        ends="gloo aborts a rank whose call has another size than that of its peer",
    ),
    Case(
        "thread_on_same_group",
        2,
        Kind.HANG,
        (Cause.OTHER_ORDER, Cause.ALONE_IN_COLLECTIVE, Cause.LEFT_OUT_COLLECTIVE),
        (r(0), r(1)),
        ("monitor", "new_group"),
        wrong=(Cause.STUCK_OUTSIDE, Cause.UNEVEN_STEPS),
        ends="gloo aborts a rank whose call has another size than that of its peer",
    ),
    Case("group_of_few", 3, Kind.HANG, (Cause.OTHER_ORDER,), words=("group",), wrong=(Cause.UNEVEN_STEPS,)),
)

DEATHS = (
    Case("bad_label", 3, Kind.DEATH, (Cause.RAISED,), (r(2),), ("ValueError", "label 77 is out of range")),
    Case("quota_exit", 3, Kind.DEATH, (Cause.EXITED,), (r(1),), ("3",)),
    Case(
        "hard_exit_zero",
        2,
        Kind.DEATH,
        (Cause.EXITED, Cause.KILLED_BY_SIGNAL),
        (r(0),),
        line=False,
        wrong=(Cause.UNEVEN_STEPS, Cause.RAISED),
        min_torch=CPP,
    ),
    Case("oom_killer", 3, Kind.DEATH, (Cause.KILLED_BY_SIGNAL,), (r(1),), line=False, wrong=(Cause.RAISED,)),
    Case(
        "preempted_rank",
        2,
        Kind.DEATH,
        (Cause.KILLED_BY_SIGNAL,),
        (r(0),),
        ("SIGTERM",),
        line=False,
        wrong=(Cause.RAISED,),
        unreached={Moment.NOTEBOOK: _BETWEEN_CELLS},
    ),
    Case(
        "leave_at_once",
        3,
        Kind.DEATH,
        (Cause.KILLED_BY_SIGNAL,),
        # the others end some milliseconds later without a trace: that all ended, and not which first, is true as well
        (r(1), r(0, 1, 2)),
        ("SIGTERM",),
        wrong=(Cause.RAISED,),
        unreached={Moment.NOTEBOOK: _BETWEEN_CELLS},
    ),
    Case("native_crash", 2, Kind.DEATH, (Cause.KILLED_BY_SIGNAL,), (r(1),), line=False, wrong=(Cause.RAISED,)),
    Case("cache_out_of_memory", 2, Kind.DEATH, (Cause.RAISED,), (r(1),), ("MemoryError",)),
    Case("hf_loss_assert", 2, Kind.DEATH, (Cause.RAISED,), (r(1),), ("AssertionError", "loss is nan at step 3")),
    Case("worker_key_error", 2, Kind.DEATH, (Cause.RAISED,), (r(0),), ("KeyError", "lang")),
    Case("two_ranks_fail", 4, Kind.DEATH, (Cause.RAISED,), (r(2),), ("KeyError", "shard_0004.tar")),
    Case(
        "pp_microbatches_differ",
        3,
        Kind.DEATH,
        (Cause.RAISED,),
        (r(2),),
        ("RuntimeError", "must match the size"),
        nearly=((Cause.OTHER_PAYLOAD, r(2)), (Cause.UNPAIRED_P2P, r(2))),
    ),
    Case("moe_bad_splits", 3, Kind.DEATH, (Cause.RAISED, Cause.OTHER_PAYLOAD), (r(1),), ("RuntimeError",)),
    Case("ddp_hook_error", 2, Kind.DEATH, (Cause.RAISED,), (r(1),), ("error feedback buffer",)),
    Case(
        "ddp_unused_head",
        2,
        Kind.DEATH,
        (Cause.RAISED,),
        (r(1),),
        ("RuntimeError", "Expected to have finished reduction"),
    ),
)

NUMBERS = (
    Case("lr_by_rank", 2, Kind.VERIFY, (Cause.OTHER_HYPERPARAMETER,), (r(0, 1), r(1), r(0)), ("lr",), line=False),
    Case(
        "decay_on_rank0",
        2,
        Kind.VERIFY,
        (Cause.OTHER_HYPERPARAMETER,),
        (r(0, 1), r(0), r(1)),
        ("weight_decay",),
        line=False,
    ),
    Case("grads_times_world", 2, Kind.VERIFY, (Cause.GRADIENT_SCALE,), line=False),
    Case("second_step_rank0", 2, Kind.VERIFY, (Cause.EXTRA_OPTIMIZER_STEP,), (r(0),), line=False),
    Case("sync_left_off", 2, Kind.VERIFY, (Cause.SYNC_LEFT_OFF,), words=("set_requires_gradient_sync",), line=False),
    Case(
        "local_norm_clip",
        2,
        Kind.VERIFY,
        (Cause.LOCAL_CLIP,),
        words=("clip",),
        line=False,
        nearly=((Cause.GRADIENT_SCALE, r()),),
    ),
    Case("nan_on_one_rank", 2, Kind.VERIFY, (Cause.NOT_FINITE,), (r(1),), line=False),
    Case(
        "smaller_last_batch",
        2,
        Kind.VERIFY,
        (Cause.UNEVEN_BATCH_SIZES,),
        line=False,
        abstain="each rank takes the mean of its own batch, with and without sharding",
    ),
    Case("unfrozen_later", 2, Kind.LINT, (Cause.NOT_AVERAGED,), words=("unfrozen", "blocks.1"), line=False),
    Case("unsplit_stream", 2, Kind.LINT, (Cause.SAME_DATA,), words=("Corpus",), line=False),
    Case("plateau_apart", 2, Kind.LINT, (Cause.OTHER_HYPERPARAMETER,), words=("learning rates",), line=False),
    Case("no_set_epoch", 2, Kind.LINT, (Cause.NOT_RESHUFFLED,), words=("set_epoch",), line=False),
    Case("same_data_everywhere", 2, Kind.LINT, (Cause.SAME_DATA,), words=("sampler",), line=False),
    Case("optimizer_too_early", 2, Kind.LINT, (Cause.OPTIMIZER_BEFORE_SHARDING,), words=("optimizer",), line=False),
    Case(
        "tied_head_lost",
        2,
        Kind.LINT,
        (Cause.TIED_WEIGHTS_LOST,),
        words=("head.weight", "embed.weight"),
        abstain="after the load nothing says that they ever were one",
        line=False,
    ),
    Case("running_stats_differ", 2, Kind.LINT, (Cause.BUFFERS_DIFFER,), words=("running_mean",), line=False),
)


def sound(name: str, ranks: int, check: str = "where", **more: object) -> Case:
    return Case(name, ranks, Kind.SOUND, line=False, check=check, **more)  # type: ignore[arg-type]


SOUND = (
    sound("sound_rank0_saves", 3),
    sound("sound_slow_rank", 3, nearly=((Cause.STUCK_OUTSIDE, r(2)),)),
    sound("sound_ddp_join", 3),
    sound("sound_no_sync", 2),
    sound("sound_long_evaluation", 3, nearly=((Cause.STUCK_OUTSIDE, r(0)),)),
    sound("sound_subgroups", 4),
    sound("sound_rank_ends_later", 3),
    sound("sound_hand_pipeline", 3),
    sound("sound_tensor_parallel", 4),
    sound("sound_hf_llama", 2),
    sound("sound_accelerate", 2),
    sound("sound_async_c10d", 3),
    sound("sound_ddp_static_graph", 2),
    sound("sound_pipelining_1f1b", 2),
    sound("sound_moe_dispatch", 3),
    sound("sound_agreed_skip", 3),
    sound("sound_async_save", 2),
    sound("sound_own_experts", 2, "lint"),
    sound("sound_own_norm", 2, "verify", abstain="in a copy with all rows, the sum over ranks is another one"),
    sound("sound_recipe_dropout", 2, "verify"),
    sound("sound_recipe_accumulate", 2, "verify"),
    sound("sound_recipe_lint", 2, "lint"),
)

CASES = (*HANGS, *DEATHS, *NUMBERS, *SOUND)
