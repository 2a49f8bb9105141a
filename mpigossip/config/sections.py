"""The sections of a job, frozen dataclasses: every setting with its type, limit and default.

`reading` makes a job of TOML. Neither torch nor MPI is imported here.
"""

# No `from __future__ import annotations`: cattrs drops the limits of annotations that are texts.

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from mpigossip.config.limits import (
    AboveZero,
    Batch,
    Chance,
    Count,
    Devices,
    Name,
    NotNegative,
    OneOrMore,
    Percent,
    Placement,
    Positive,
    Seed,
    Shape,
    Share,
    Text,
    Threads,
    Workers,
)
from mpigossip.config.toml import Limit


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Section `[run]`: how long, from which seed, and where to."""

    name: Name = "run"
    """Name of the run, used in `output`."""
    seed: Seed = 0
    """Seed of initial parameters, sample order, random graphs and random rounding."""
    epochs: Count = 10
    """Passes over the training samples."""
    steps: Count | None = None
    """Stop after so many steps even if epochs are left (for trials)."""
    output: Text = "runs/{name}"
    """Folder of the run; `{name}` stands for `run.name`."""
    evaluate_every: Count = 1
    """Epochs between evaluations; 0 evaluates only at the end."""
    evaluate_steps: Count = 0
    """Steps between further evaluations, whatever the epoch; 0: none."""
    recalibrate: Count = 0
    """Training batches a node by which the batch norms of the averaged model get statistics of
    their own before it is tested; 0: it has the mean of the nodes'."""
    survive: bool = False
    """Continue after rank failures, where MPI is fault-tolerant (Open MPI, started with
    `mpirun --with-ft ulfm`). Costs a copy of the node's state at every step, in host memory."""

    @property
    def folder(self) -> Path:
        """`output` with the name filled in."""
        path = self.output.replace("{name}", self.name)
        return Path(os.path.expanduser(path))  # noqa: PTH111  Path's raises for a user unknown here


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """Section `[task]`: loss and metrics of the training; further keys are the task's options."""

    name: Text = "classification"
    """`"classification"`, `"language-model"`, or `"package.module:factory"`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only parameters of the task's factory."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Section `[data]`: samples, how nodes share them, and how they are decoded or loaded."""

    source: Text = "digits"
    """`"digits"` (built in), `"synthetic"`, a packed `.h5` file, or "package.module:function"."""
    batch: Batch = 32
    """Samples per slot per gradient."""
    partition: Literal["shuffled", "sorted", "mixed", "dirichlet"] = "shuffled"
    """Partition over nodes: at random, by label (the hardest case), or between the two."""
    shuffled_percent: Percent = 100.0
    """Percentage of the samples that partition "mixed" shuffles; the rest is sorted by label."""
    dirichlet_alpha: AboveZero = 0.1
    """Partition "dirichlet": small gives a node few classes, large gives all alike."""
    augment: Literal["none", "crop-flip", "resized-crop"] = "none"
    """Random changes of training images."""
    image_size: Positive | None = None
    """Side in pixels that images are brought to; unset keeps their size."""
    samples: Positive = 1024
    """Training samples (synthetic); samples of an epoch (a stream whose length isn't known)."""
    test_samples: Positive = 256
    """Test samples (synthetic); test samples at most (a stream whose length isn't known)."""
    shape: Shape = (3, 32, 32)
    """Shape of one sample: channels, height, width (synthetic only)."""
    classes: Positive = 10
    """Number of classes (synthetic samples, and Datasets of one's own)."""
    context: Positive = 128
    """Tokens of a sample (packed text only)."""
    windows: Literal["joined", "apart"] = "joined"
    """Samples of a packed text run over the ends of its documents, or stay within one."""
    every: Positive = 1
    """Every so many-th training sample of a packed text: 10 is a tenth of the text, for trials."""
    tokenizer: Text | None = None
    """Of a packed text, as `data show` names it; unset takes any. Another one is a mistake."""
    workers: Literal["auto"] | Workers = "auto"
    """Decoding or loading processes per node; 0 does it in the training process; auto: 2, on GPUs
    2 a slot as far as there are cores."""
    cache: Literal["auto", "always", "never"] = "auto"
    """Keep decoded samples in memory: where they fit, always, or never."""
    options: dict[str, Any] = field(default_factory=dict)
    """Parameters of one's own function in `source`."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Section `[model]`: the network; further keys are its options."""

    name: Text = "mlp"
    """A built-in model, or `"package.module:factory"`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only parameters of the model's factory."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSection:
    """Section `[algorithm]`: what a step does; further keys are the algorithm's options."""

    name: Text = "dmsgd"
    """The decentralized method, or "package.module:factory"."""
    weight_decay: NotNegative = 0.0
    """Added to the gradient as weight_decay × parameter (AdamW: decoupled)."""
    decay_all: bool = True
    """false leaves biases and parameters of norm layers without weight decay."""
    clip_norm: AboveZero | None = None
    """Largest norm of a node's gradient; unset never clips."""
    accumulate: Batch = 1
    """Batches whose gradients are averaged into one step."""
    blend: Share | None = None
    """With `cadence.delay`: the weight α of what was received in x ← α · mixed + (1 − α) · x, as
    α = 1 would undo the steps since it was sent; unset: 0.5, without a delay 1."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only parameters of the algorithm's builder."""


@dataclass(frozen=True, kw_only=True)
class LocalSection:
    """Section `[local]`: the local step inside the algorithm; further keys are its options."""

    name: Text | None = None
    """The local optimizer; unset takes the algorithm's usual one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only parameters of the local step's builder."""


@dataclass(frozen=True, kw_only=True)
class GraphSection:
    """Section `[graph]`: who averages with whom; further keys are the graph's options."""

    name: Text = "one-peer-exponential"
    """A built-in graph, `"file:PATH"`, or `"package.module:function"`."""
    weights: Text | None = None
    """Weighting rule in place of the graph's own."""
    lazy: bool = False
    """Use (I + W)/2 in place of W."""
    seed: Seed | None = None
    """Seed of a random graph; unset takes `run.seed`."""
    placement: Placement = "given"
    """`"given"`: rank i has place i; `"hostnames"`, `"scheduler"` or `"file:PATH"` (lines HOST
    RACK): ranks of a rack get places that exchange most."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only parameters of the graph's builder."""


@dataclass(frozen=True, kw_only=True)
class CadenceSection:
    """Section `[cadence]`: which steps average; further keys are the cadence's options."""

    name: Text = "always"
    """The rule that makes each step local, gossip or global."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only parameters of the cadence's builder."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Section `[schedule]`: the learning rate."""

    name: Literal["constant", "milestones", "cosine"] = "milestones"
    """Shape of the learning rate after warm-up."""
    lr: AboveZero = 0.1
    """Learning rate at `reference_batch` samples per step."""
    scale: Literal["linear", "none"] = "linear"
    """linear: lr × (samples per step over all nodes) / reference_batch; none: lr as given, which
    is the default with an adaptive local step (adamw, accumadam, muon)."""
    reference_batch: Positive = 256
    """Samples per step for which `lr` is meant."""
    warmup_epochs: NotNegative = 0.0
    """Epochs of linear growth to the full rate: from `lr` where that is less, else from 0."""
    warmup_lr: AboveZero | None = None
    """A rate that the warm-up keeps, in place of growing."""
    milestones: tuple[NotNegative, ...] = ()
    """Epochs at which the learning rate is multiplied by `factor`, in ascending order."""
    factor: AboveZero = 0.1
    """Multiplier at a milestone."""
    final_lr: NotNegative = 0.0
    """Learning rate at the end of a cosine."""


@dataclass(frozen=True, kw_only=True)
class NodeSection:
    """Section `[node]`: devices of a node and the way to its neighbours."""

    devices: Devices = "auto"
    """Slots of a rank: `"cpu:L"` (L of them), `"gpu:K"` (K GPUs) or `"cuda:0-7"`. auto: the GPUs
    that torch sees, divided among the ranks of a host; `"cpu:1"` where there is none."""
    ranks_per_node: Literal["auto", "host"] | Positive = "auto"
    """1: each rank is a node, whose slots are its `devices`; K: every K ranks of a host are one;
    "host": all of a host; auto: all of a host that has a GPU for each, else 1. A node has the slots
    of all its ranks."""
    threads: Threads = 1
    """Torch threads per slot; runs are bitwise identical at equal numbers only."""
    same_host: Literal["read", "put"] = "read"
    """Neighbours on the same host: read in place, or put as between hosts; always put by GPUs."""
    shard: bool = True
    """Each slot updates and exchanges its shard of the model; false: slot 0 does it all."""
    sums: Literal["slots", "nccl"] = "slots"
    """Order of sums over a node's GPUs: that of slots, so that a node's GPUs give the same bits as
    threads or processes; or NCCL's, which takes less memory and may be faster."""
    timeout_s: AboveZero = 300.0
    """Seconds after which a neighbour that doesn't answer is given up, or a slot that is so much
    later than the node's others (0.8 of them)."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of forward and backward; auto: bf16 where the device has it, else fp32."""
    wire: Text = "fp32"
    """Format of messages between nodes: "fp32"; "bf16", "qsgd", "fp4" are lossy; "sign", "top-k",
    "top-k-int2", "random-k", "shared-k" leave out most of the values or bits."""
    levels: Annotated[int, Limit(lambda v: 1 <= v <= 127, "must be between 1 and 127")] = 127
    """Levels of wire "qsgd": 1 takes 2 bits a value, up to 7 take 4, up to 127 take 8."""
    density: Annotated[float, Limit(lambda v: 0 < v <= 1, "must be above 0 and at most 1")] = 0.01
    """Fraction of the values that the wires "top-k…" and "…-k" send."""
    vmap: bool = False
    """Simulator: gradients of all nodes in one vectorized call. Faster for small models, without
    the bits of a run on ranks; for models without norm statistics."""
    compile: bool = False
    """Pass the model through torch.compile."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Replay the step as a CUDA graph; auto: on GPUs, where capture works."""
    channels_last: Literal["auto", "always", "never"] = "auto"
    """Weights of convolutions lie channels last, and cuDNN chooses algorithms by trying them, so
    that a run's last bits may differ from another's; auto: on NVIDIA's GPUs."""
    exchange: Literal["auto", "windows", "messages", "nccl", "host"] = "auto"
    """Transport of GPU memory to other nodes: MPI_Put from device to device, MPI messages
    likewise, NCCL, or windows in pinned host memory; auto: the fastest that is proven to work."""
    mixer: Text = "synchronous"
    """"synchronous": neighbours' models of the same round; "asynchronous": their newest whole
    copies, without waiting."""


@dataclass(frozen=True, kw_only=True)
class FaultsSection:
    """Section `[faults]`: faults of a simulated run, drawn from `run.seed`.

    Slow nodes are for asynchronous runs; lost links and nodes that are away for others, too: there
    graphs are reweighted so that the mean stays.
    """

    slow_times: OneOrMore = 1.0
    """Factor by which a slow node computes longer; 1: none is slow."""
    slow_nodes: Positive = 1
    """Nodes that are slow at a time, drawn anew every `slow_steps` steps."""
    slow_steps: Positive = 10
    """Steps that a node stays slow."""
    lost: Chance = 0.0
    """Probability that a node doesn't see another one in a round; synchronous: that their link
    carries nothing, either way."""
    lost_rounds: NotNegative = 0.0
    """Rounds that a lost link stays lost, on the average; 0: drawn anew each round."""
    away: Chance = 0.0
    """Probability that a node takes no part in a round; its steps go on."""
    away_rounds: NotNegative = 0.0
    """Rounds that it stays away, on the average; 0: drawn anew each round."""
    ticks: NotNegative = 0.0
    """Ticks a round of each node's Poisson clock: it takes part in rounds with one; 0: in all."""


@dataclass(frozen=True, kw_only=True)
class ClockSection:
    """Section `[clock]`: the time that steps would have taken elsewhere, for the log's `virtual_s`.

    By the formulas of `mpigossip plan`; nothing of the training depends on it.
    """

    network: Text = "none"
    """`"none"`: no such time; a network by name (`"1gbit"`, `"10gbit"`, `"25gbit"`, `"100gbit"`,
    `"200gbit"`, `"400gbit"`, `"internet-100mbit"`), or a file of `mpigossip plan … --save FILE`."""
    compute_s: AboveZero | None = None
    """Seconds of a step's forward and backward; unset takes the file's."""
    latency_s: NotNegative | None = None
    """Seconds of a small round; unset takes the network's."""
    bandwidth: AboveZero | None = None
    """Bytes a second that a node sends and receives at once; unset takes the network's."""
    jitter: NotNegative | None = None
    """Standard deviation of computing from step to step, as a fraction of it; unset takes the
    file's, else 0."""
    slow_times: OneOrMore = 1.0
    """Factor by which a straggler computes longer; 1: there is none."""
    slow_nodes: Positive = 1
    """Stragglers at a time, drawn from `run.seed` anew every `slow_steps` steps."""
    slow_steps: Positive = 10
    """Steps that a node stays one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Section `[checkpoint]`: when to save, and how much to keep."""

    every_steps: Count = 0
    """Steps between checkpoints; 0 saves only at the end and when stopped."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    keep_every: Count = 0
    """Checkpoints at multiples of so many steps are kept for good; 0 keeps none besides `keep`."""
    one_file_gb: NotNegative = 4.0
    """GB of a node's model and state up to which its ranks send their shards to the first, which
    writes one file; above, each slot writes its own, as one process would be waited for (but where
    `node.channels_last` permutes parameters)."""
    on_error: Literal["stop", "continue"] = "stop"
    """Effect of a checkpoint that can't be written on the run."""
    wall_clock_s: NotNegative = 0.0
    """Seconds after its start at which a run must have ended, with a checkpoint; 0: no limit but
    the allocation's end."""


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """Section `[log]`: what is recorded, and how often."""

    flush_steps: Positive = 50
    """Steps between writes to the file; a crash loses at most so many."""
    on_error: Literal["stop", "continue"] = "stop"
    """Effect of a log that can't be written on the run; "continue" keeps the steps and tries again
    at the next write, and stops at the end if that fails, too."""
    consensus_every: Literal["auto"] | Count = "auto"
    """Steps between measurements of the consensus distance; 0 never measures; auto: 10, on GPUs
    100, where a step is short beside sending a whole model."""
    straggler_times: NotNegative = 2.0
    """A node that computes so many times longer than the median is a straggler; 0 never checks."""
    straggler_s: NotNegative = 60.0
    """Seconds that it must last until the straggler is named."""
    diverging_times: NotNegative = 10.0
    """Growth of the consensus distance that is warned of; 0 never checks."""
    diverging_steps: Positive = 1000
    """Steps within which it has grown so."""
    hooks: tuple[Text, ...] = ()
    """Hooks that watch the run: `"tensorboard"`, or `"package.module:factory"`, called with the
    world (its `rank` and `size`) and returning a mpigossip.runs.hooks.Hook."""


@dataclass(frozen=True, kw_only=True)
class MembersSection:
    """Section `[members]`: of a training that members join and leave (`mpigossip join`)."""

    lease_s: Annotated[float, Limit(lambda v: 120 <= v < 1e7, "must be at least 120")] = 600.0
    """Seconds of silence that a member promises at most; later others take its chunks. At least
    five rounds."""
    claim_rounds: Positive = 16
    """Rounds for which a member claims chunks at once, at most."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that defines a run."""

    run: RunSection = field(default_factory=RunSection)
    task: TaskSection = field(default_factory=TaskSection)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    local: LocalSection = field(default_factory=LocalSection)
    graph: GraphSection = field(default_factory=GraphSection)
    cadence: CadenceSection = field(default_factory=CadenceSection)
    schedule: Schedule = field(default_factory=Schedule)
    node: NodeSection = field(default_factory=NodeSection)
    faults: FaultsSection = field(default_factory=FaultsSection)
    clock: ClockSection = field(default_factory=ClockSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    members: MembersSection = field(default_factory=MembersSection)


SECTIONS: dict[str, type] = {f.name: f.default_factory for f in fields(Job)}  # type: ignore[misc]
"""The dataclass of each section."""
