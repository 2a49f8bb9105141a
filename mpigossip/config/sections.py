"""Sections of a job, as frozen dataclasses: every setting with its type, limits and default.

The module `reading` builds a job from TOML. This module imports neither torch nor MPI.
"""

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
    NodeWeights,
    NotNegative,
    OneOrMore,
    Percent,
    Period,
    Placement,
    Positive,
    RanksPerNode,
    Seed,
    Shape,
    Share,
    Text,
    Threads,
    Workers,
    between,
)
from mpigossip.config.structure import Limit


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Section `[run]`: length, seed and output folder of a run."""

    name: Name = "run"
    """Name of the run, which replaces `{name}` in `output`."""
    seed: Seed = 0
    """Seed of the random numbers of the run, such as the initial parameters, the partition and the
    order of samples, random graphs and random rounding."""
    epochs: Count = 10
    """Number of passes over the training samples."""
    steps: Count | None = None
    """Largest number of steps: the run stops there even if epochs remain (for trials). If unset,
    `epochs` alone decides."""
    output: Text = "runs/{name}"
    """Run directory; `{name}` stands for `run.name`."""
    evaluate_every: Count = 1
    """Number of epochs between two evaluations; 0: evaluate only at the end."""
    evaluate_steps: Count = 0
    """Number of steps between two additional evaluations, independent of epochs; 0: no additional
    evaluations."""
    recalibrate: Count = 0
    """Number of training batches per node from which the averaged model computes new batch norm
    statistics before it is evaluated; 0: it uses the mean of the nodes' statistics."""
    survive: bool = False
    """True if the run continues after rank failures. This requires a fault-tolerant MPI (Open MPI,
    started with `mpirun --with-ft ulfm`) and copies the node's state to host memory at every
    step."""

    @property
    def folder(self) -> Path:
        """Run directory: `output` with the name inserted and `~` expanded."""
        path = self.output.replace("{name}", self.name)
        return Path(os.path.expanduser(path))  # noqa: PTH111  Path.expanduser raises if ~user is unknown


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """Section `[task]`: loss and metrics of the training; further keys are options of the task."""

    name: Text = "classification"
    """Name of the task: `"classification"`, `"language-model"`, or a custom task as
    `"package.module:factory"`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task, which are keyword arguments of its factory."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Section `[data]`: samples, their partition over nodes, and how they are loaded."""

    source: Text = "digits"
    """Data set: `"digits"` (built in), `"synthetic"`, the path of a packed `.h5` file, or a custom
    data set as `"package.module:function"`."""
    batch: Batch = 32
    """Number of samples per slot for each gradient."""
    partition: Literal["shuffled", "sorted", "mixed", "dirichlet"] = "shuffled"
    """Partition of the samples over nodes. "shuffled": at random; "sorted": by label, which is the
    hardest case; "mixed" and "dirichlet" lie between the two and are set by `shuffled_percent` and
    `dirichlet_alpha`."""
    shuffled_percent: Percent = 100.0
    """Percentage of the samples that the partition "mixed" shuffles; the others are sorted by
    label."""
    dirichlet_alpha: AboveZero = 0.1
    """Concentration α of the partition "dirichlet": with a small value, each node has few classes;
    with a large value, all nodes have similar classes."""
    augment: Literal["none", "crop-flip", "resized-crop"] = "none"
    """Random changes of training images. crop-flip: images are shifted by up to 4 pixels, and half
    of them are mirrored; resized-crop: crops of 8 % to 100 % of the area are resized to
    `image_size`, and half of them are mirrored."""
    image_size: Positive | None = None
    """Side, in pixels, to which images are resized; if unset, images keep their size."""
    samples: Positive = 1024
    """Number of training samples of the source "synthetic"; number of samples per epoch of a stream
    of unknown length."""
    test_samples: Positive = 256
    """Number of test samples of the source "synthetic"; largest number of test samples of a stream
    of unknown length."""
    shape: Shape = (3, 32, 32)
    """Shape of one sample of the source "synthetic": channels, height, width."""
    classes: Positive = 10
    """Number of classes of the source "synthetic" and of a custom Dataset."""
    context: Positive = 128
    """Number of tokens per sample of a packed text."""
    windows: Literal["joined", "apart"] = "joined"
    """Samples of a packed text: with "joined" they cross the ends of documents, with "apart" each
    sample lies within one document."""
    every: Positive = 1
    """Stride over the training samples of a packed text: 10 trains on every tenth sample, for
    trials."""
    tokenizer: Text | None = None
    """Tokenizer that the packed text must use, by the name that `data show` prints; if unset, any
    is accepted."""
    workers: Literal["auto"] | Workers = "auto"
    """Number of processes per node that decode or load samples; 0: the training process does this
    itself; auto: 2, or on GPUs two per slot, if there are enough cores."""
    cache: Literal["auto", "always", "never"] = "auto"
    """Use of a cache in memory for decoded samples; auto: if they fit."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the custom function in `source`."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Section `[model]`: the model that is trained; further keys are options of the model."""

    name: Text = "mlp"
    """Name of a built-in model, or a custom model as `"package.module:factory"`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the model, which are keyword arguments of its factory."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSection:
    """Section `[algorithm]`: the decentralized algorithm; further keys are its options."""

    name: Text = "dmsgd"
    """Name of a built-in algorithm, or a custom algorithm as `"package.module:factory"`."""
    weight_decay: NotNegative = 0.0
    """Coefficient of the weight decay: the gradient is increased by weight_decay × parameter. With
    AdamW, the weight decay is decoupled from the gradient."""
    decay_all: bool = True
    """True if weight decay applies to all parameters; false: not to biases and to parameters of
    normalization layers."""
    clip_norm: AboveZero | None = None
    """Largest norm of a node's gradient, to which larger gradients are scaled down; if unset,
    gradients are not clipped."""
    accumulate: Batch = 1
    """Number of batches whose gradients are averaged for one step."""
    blend: Share | None = None
    """Weight γ of the received average in x ← γ · mixed + (1 − γ) · x. With `cadence.delay` and
    γ = 1, the steps made since the message was sent would be undone. If unset, γ is 0.5 with a
    delay and 1 without."""
    average_state: dict[str, Period] = field(default_factory=dict)
    """Period, in steps, with which arrays of the local step are averaged between nodes, too, by
    name: `{second = 16}` averages the running mean of g² of AdamW at every 16th step."""
    node_weights: Literal["equal", "steps"] | NodeWeights = "equal"
    """Weight of each node in averages between nodes: `"equal"`; `"steps"`: in proportion to its
    local steps in a period, which a list as `cadence.period` gives; or a list with a positive
    number for each node."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only arguments of the algorithm's builder."""


@dataclass(frozen=True, kw_only=True)
class LocalSection:
    """Section `[local]`: the local step inside the algorithm; further keys are its options."""

    name: Text | None = None
    """Name of the local optimizer; if unset, the default of the algorithm is used."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only arguments of the local step's builder."""


@dataclass(frozen=True, kw_only=True)
class GraphSection:
    """Section `[graph]`: the graph along which nodes exchange; further keys are its options."""

    name: Text = "one-peer-exponential"
    """Name of a built-in graph, a graph from a file as `"file:PATH"`, or a custom graph as
    `"package.module:function"`."""
    weights: Text | None = None
    """Rule that computes the mixing matrix; if unset, the graph's own weights are used."""
    lazy: bool = False
    """True if the mixing matrix W is replaced by (I + W)/2."""
    seed: Seed | None = None
    """Seed of a random graph; if unset, `run.seed` is used."""
    placement: Placement = "given"
    """Assignment of ranks to graph nodes. `"given"`: rank i is graph node i. `"hostnames"`,
    `"scheduler"` and `"file:PATH"` name the source of each host's rack (a file has lines
    `HOST RACK`): ranks of one rack are assigned to graph nodes that exchange most with each
    other."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only arguments of the graph's builder."""


@dataclass(frozen=True, kw_only=True)
class CadenceSection:
    """Section `[cadence]`: rule that picks steps that exchange; further keys are its options."""

    name: Text = "always"
    """Name of the rule that makes each step local, gossip or global."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword-only arguments of the cadence's builder."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Section `[schedule]`: the learning rate."""

    name: Literal["constant", "milestones", "cosine"] = "milestones"
    """Course of the learning rate after the warm-up."""
    lr: AboveZero = 0.1
    """Learning rate: with `scale = "linear"`, for `reference_batch` samples per step; otherwise,
    for any number of samples."""
    scale: Literal["linear", "none"] = "linear"
    """Scaling of the learning rate. linear: the full rate is lr × (samples per step of all nodes) /
    reference_batch; none: the full rate is lr, which is the default with an adaptive local step
    (adamw, accumadam, muon) and with theory tasks."""
    reference_batch: Positive = 256
    """Number of samples per step to which `lr` refers."""
    warmup_epochs: NotNegative = 0.0
    """Number of epochs in which the learning rate grows linearly to the full rate. It grows from
    `lr` if the full rate is higher, otherwise from 0."""
    warmup_lr: AboveZero | None = None
    """Constant learning rate during the warm-up; if unset, the learning rate grows."""
    milestones: tuple[NotNegative, ...] = ()
    """Epochs, in ascending order, at which the learning rate is multiplied by `factor`."""
    factor: AboveZero = 0.1
    """Factor by which the learning rate is multiplied at each milestone."""
    final_lr: NotNegative = 0.0
    """Learning rate at the end of the schedule "cosine"."""


@dataclass(frozen=True, kw_only=True)
class NodeSection:
    """Section `[node]`: devices of a node, arithmetic, and communication with its neighbours."""

    devices: Devices = "auto"
    """Slots of a rank: `"cpu:L"` (L slots on CPU cores), `"gpu:K"` (K GPUs) or device numbers such
    as `"cuda:0-7"`. auto: the GPUs that torch detects, divided among the ranks of a host, or
    `"cpu:1"` if there is none."""
    ranks_per_node: Literal["auto", "host"] | RanksPerNode = "auto"
    """Number of ranks that form a node. 1: each rank is a node; K: every K ranks of a host form a
    node; "host": all ranks of a host form a node; auto: "host" if `devices` is "auto" and the host
    has a GPU for each of its ranks, otherwise 1. The slots of a node are the `devices` of all its
    ranks."""
    threads: Threads = 1
    """Number of torch threads per slot. Two runs are bitwise identical only if they use the same
    number."""
    same_host: Literal["read", "put"] = "read"
    """Exchange with neighbours on the same host. read: their messages are read in shared memory
    without a copy; put: messages are sent as between hosts. GPUs always use "put"."""
    shard: bool = True
    """True if each slot updates and exchanges its shard of the model; false: slot 0 updates and
    exchanges the complete model."""
    sums: Literal["slots", "nccl"] = "slots"
    """Order of sums over the GPUs of a node. slots: the order of the slots, so that the result is
    bitwise identical to the result with threads or processes; nccl: the order of NCCL, which needs
    less memory and can be faster."""
    bucket_mb: NotNegative = 64.0
    """Size, in MB, of the parts of the model that are averaged over the slots of a node while the
    backward pass continues, and gathered while the forward pass begins; 0: after the backward pass
    and before the forward pass. Only nodes whose ranks have one GPU each do this, and only with
    `cuda_graphs = "never"` and without `compile`. With `sums = "nccl"` and more than two slots, the
    size changes the order of sums, and so the bits of the result."""
    timeout_s: AboveZero = 300.0
    """Time limit, in seconds, of each wait for a neighbour. A slot that is later than the other
    slots of its rank by 0.8 times this limit ends the run, too, and so does a rank that is later
    than the other ranks of its node by twice this limit."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of forward and backward; auto: bf16 if all ranks
    have GPUs that support it, otherwise fp32."""
    wire: Text = "fp32"
    """Format of messages between nodes. "fp32" is exact; "bf16", "qsgd" and "fp4" are lossy;
    "sign", "top-k", "top-k-int2", "random-k" and "shared-k" omit most of the values or bits."""
    levels: Annotated[int, between(1, 127, "must be between 1 and 127")] = 127
    """Number of levels of the wire "qsgd": 1 level needs 2 bits per value, up to 7 levels need 4
    bits, and up to 127 levels need 8 bits."""
    density: Annotated[
        float,
        Limit(
            lambda v: 0 < v <= 1,
            "must be above 0 and at most 1",
            {"exclusiveMinimum": 0, "maximum": 1},
        ),
    ] = 0.01
    """Fraction of the values that the wires "top-k", "top-k-int2", "random-k" and "shared-k"
    send."""
    vmap: bool = False
    """True if the simulator computes the gradients of all nodes in one vectorized call. This is
    faster for small models, but not bitwise identical to a run on ranks, and requires a model
    without norm statistics."""
    compile: bool = False
    """True if the model is compiled with torch.compile."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Replay of the forward and backward passes as a CUDA graph; auto: on NVIDIA GPUs, if they can
    be captured."""
    channels_last: Literal["auto", "always", "never"] = "auto"
    """Use of the memory format channels_last for the weights of convolutions. On GPUs, cuDNN then
    picks algorithms by trying them, so that the last bits of two runs may differ. auto: on NVIDIA
    GPUs."""
    exchange: Literal["auto", "windows", "messages", "nccl", "host"] = "auto"
    """Transport between GPUs of different nodes. windows: MPI_Put between device memories;
    messages: MPI messages between device memories; nccl: NCCL; host: windows in pinned host
    memory; auto: the fastest transport that is proven to work."""
    mixer: Text = "synchronous"
    """Mixer of a run. "synchronous" averages with the models of the same round; "asynchronous"
    averages with the newest complete copies of the neighbours' models, without waiting."""


@dataclass(frozen=True, kw_only=True)
class FaultsSection:
    """Section `[faults]`: faults of a simulated run, drawn from `run.seed`.

    Slow nodes require an asynchronous run. Lost links are possible in synchronous runs, too. Absent
    nodes require a synchronous run, whose graphs are then reweighted to keep the mean of the nodes.
    """

    slow_times: OneOrMore = 1.0
    """Factor by which the computing time of a slow node is multiplied; 1: no node is slow."""
    slow_nodes: Positive = 1
    """Number of nodes that are slow at the same time; they are drawn again every `slow_steps`
    steps."""
    slow_steps: Positive = 10
    """Number of steps for which a node stays slow."""
    lost: Chance = 0.0
    """Probability that a node receives nothing from another node in a round. In a synchronous run,
    the link then carries nothing in either direction."""
    lost_rounds: NotNegative = 0.0
    """Mean number of consecutive rounds in which a lost link stays lost; 0: each round is drawn
    independently."""
    away: Chance = 0.0
    """Probability that a node does not take part in a round; its local steps continue."""
    away_rounds: NotNegative = 0.0
    """Mean number of consecutive rounds in which an absent node stays absent; 0: each round is
    drawn independently."""
    ticks: NotNegative = 0.0
    """Mean number of ticks per round of each node's Poisson clock. A node takes part only in
    rounds in which its clock ticks; 0: in all rounds."""


@dataclass(frozen=True, kw_only=True)
class ClockSection:
    """Section `[clock]`: estimate of the time that the steps would take on another network.

    The times are recorded in the column `virtual_s` of the log and follow from the formulas of
    `mpigossip plan`. The training does not depend on them.
    """

    network: Text = "none"
    """Network whose times are estimated: `"none"` (no estimate), a name (`"1gbit"`, `"10gbit"`,
    `"25gbit"`, `"100gbit"`, `"200gbit"`, `"400gbit"`, `"internet-100mbit"`), or a file written by
    `mpigossip plan … --save FILE`."""
    compute_s: AboveZero | None = None
    """Seconds of the forward and backward passes of a step; if unset, the value in the file."""
    latency_s: NotNegative | None = None
    """Seconds of a round with a small message; if unset, the value of the network."""
    bandwidth: AboveZero | None = None
    """Bytes per second that a node can send and receive simultaneously; if unset, the value of the
    network."""
    jitter: NotNegative | None = None
    """Standard deviation of the computing time between steps, as a fraction of this time; if
    unset, the value in the file, or 0 without a file."""
    slow_times: OneOrMore = 1.0
    """Factor by which the computing time of a straggler is multiplied; 1: there are no
    stragglers."""
    slow_nodes: Positive = 1
    """Number of simultaneous stragglers; they are drawn again from `run.seed` every `slow_steps`
    steps."""
    slow_steps: Positive = 10
    """Number of steps for which a node stays a straggler."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Section `[checkpoint]`: times at which checkpoints are written, and number of kept ones."""

    every_steps: Count = 0
    """Number of steps between two checkpoints; 0: checkpoints are written only at the end and when
    the run is stopped."""
    keep: Positive = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Count = 0
    """Interval in steps: checkpoints at its multiples are never deleted; 0: only the newest `keep`
    checkpoints are kept."""
    one_file_gb: NotNegative = 4.0
    """Largest size, in GB, of a node's model and state for which the first rank of the node
    collects all shards and writes one file. Above it, each slot writes its own file, so that no
    rank waits for one writer; if a node has one rank, or if `node.channels_last` permutes
    parameters, there is always one file."""
    on_error: Literal["stop", "continue"] = "stop"
    """Effect on the run if a checkpoint cannot be written. stop: the run ends with an error;
    continue: the error is reported and the run continues without this checkpoint."""
    wall_clock_s: NotNegative = 0.0
    """Seconds after its start by which a run ends with a checkpoint; 0: only the end of the
    allocation limits the run."""


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """Section `[log]`: metrics in the log, warnings and hooks."""

    flush_steps: Positive = 50
    """Number of steps between two writes to the log file, and therefore the largest number of
    steps whose metrics a crash can lose."""
    on_error: Literal["stop", "continue"] = "stop"
    """Effect on the run if the log cannot be written. stop: the run ends with an error; continue:
    the metrics are kept in memory until the next write; if the last write, at the end of the run,
    fails as well, the run stops with an error."""
    consensus_every: Literal["auto"] | Count = "auto"
    """Number of steps between two measurements of the consensus distance; 0: it is never measured;
    auto: 10, or 100 on GPUs, whose steps are short compared with sending a complete model."""
    straggler_times: NotNegative = 2.0
    """Computing time, as a multiple of the nodes' median, above which a node is a straggler; 0:
    stragglers are not detected."""
    straggler_s: NotNegative = 60.0
    """Seconds for which a node must be a straggler before a warning names it."""
    diverging_times: NotNegative = 10.0
    """Growth factor of the consensus distance above which a warning is printed; 0: the growth is
    not checked."""
    diverging_steps: Positive = 1000
    """Number of steps over which the growth of the consensus distance is measured."""
    hooks: tuple[Text, ...] = ()
    """Hooks that observe the run: `"tensorboard"`, or a custom hook as `"package.module:factory"`.
    The factory is called with the world, which has `rank` and `size`, and returns a
    mpigossip.runs.hooks.Hook."""


@dataclass(frozen=True, kw_only=True)
class MembersSection:
    """Section `[members]`: training that members join and leave at any time (`mpigossip join`)."""

    lease_s: Annotated[
        float,
        Limit(
            lambda v: 120 <= v < 1e7,
            "must be at least 120 and below 1e7",
            {"minimum": 120, "exclusiveMaximum": 1e7},
        ),
    ] = 600.0
    """Longest silence of a member, in seconds; after it, other members take over its chunks. A
    lease must be at least as long as five rounds."""
    claim_rounds: Positive = 16
    """Largest number of rounds for which a member claims chunks at a time."""
    keep_every: Count = 0
    """Number K of rounds: the model of each K-th round of a place is never removed, so that `replay
    --fork` starts from it; `replay --audit` needs 1. 0: old models are removed. `plan --members`
    prints the space on disk."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Definition of a run: one attribute for each section."""

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
"""Dataclass of each section, by name."""
