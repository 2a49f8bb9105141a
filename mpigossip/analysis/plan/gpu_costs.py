"""Time of the parts of a step on GPUs, from bytes and launches that were counted.

The emulation of GPUs in tests/double counts the bytes that a step reads and writes and the
operations that it launches; tests/double/test_counts.py compares them with the numbers of this
module. Divided by the rates of a GPU's data sheet, they give the time of an update and of the
averages inside a node. Nothing here was measured on several GPUs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from mpigossip.algorithms.methods import BUILDERS
from mpigossip.cluster.local_devices import slots_of
from mpigossip.config import Job, JobError
from mpigossip.config.choices import keyword_only, spec_of
from mpigossip.training.assemble import allows_buckets, allows_gather
from mpigossip.training.costs import Subject
from mpigossip.training.machines import Machine
from mpigossip.training.time_model import BACKWARD

EFFICIENCY = 0.85
"""Assumed fraction of the rates of a data sheet that kernels and collectives reach."""
LAUNCH_S = 5e-6
"""Assumed seconds in which the host launches an operation."""
ELEMENT = 4
"""Bytes of an element, float32."""
SUM_BYTES = 3 * ELEMENT
"""Bytes per element of a weighted sum of two models: it reads both and writes the result."""


class Gpu(NamedTuple):
    """Rates of a GPU, from its data sheet."""

    memory_rate: float
    """Bytes per second of its memory."""
    link_rate: float
    """Bytes per second that it sends to other GPUs of the host, and at the same time receives."""


GPUS = {
    "a100": Gpu(2.039e12, 300e9),
    "h100": Gpu(3.35e12, 450e9),
    "h200": Gpu(4.8e12, 450e9),
}
"""GPUs by the names of `plan --gpu`: A100 SXM with 80 GB, H100 SXM and H200 SXM."""


class Update(NamedTuple):
    """Counts of a step of an algorithm, without the model, the node's averages and the sum."""

    bytes_per_element: int
    """Bytes read and written per element of a slot's shard."""
    operations: int
    """Number of operations launched by a slot."""


UPDATES: Mapping[tuple[str, str, str], Update] = {
    ("dsgd", "awc", "adamw"): Update(112, 19),
    ("dsgd", "atc", "adamw"): Update(104, 18),
    ("dsgd", "awc", "sgd"): Update(32, 11),
    ("dmsgd-vanilla", "atc", "momentum"): Update(44, 12),
    ("dmsgd", "", ""): Update(68, 15),
}
"""Counts by algorithm, its style and its local step; "" if it has none."""
FUSED = {"sgd": 3 * ELEMENT, "momentum": 5 * ELEMENT, "nesterov": 5 * ELEMENT, "adamw": 28}
"""Bytes per element of torch's fused optimizers, which read parameter, gradient and state, and
write parameter and state. All-reduce is timed with them, by the local step of the job."""


def node_bytes(slots: int) -> float:
    """Return the bytes per element that a slot reads and writes to average gradients in the node.

    A slot sends the shards of the others, receives its own shard from them (both read and write),
    copies its own part, and sums the parts of all slots in slot order.
    """
    others = slots - 1
    transferred = 2 * ELEMENT * others
    copied = 2 * ELEMENT
    summed = ELEMENT * (slots + 1)
    return (transferred + copied + summed) / slots


def link_bytes(slots: int) -> float:
    """Return the bytes per element that a slot sends in a reduce-scatter or in an all-gather."""
    return ELEMENT * (slots - 1) / slots


def node_seconds(gpu: Gpu, slots: int, elements: int) -> float:
    """Return the seconds of averaging gradients over the slots of a node and gathering the model.

    The sums of the reduce-scatter overlap with its transfers, bucket by bucket.

    :param gpu: rates of each slot's GPU
    :param slots: number of slots of the node
    :param elements: number of elements of the model
    """
    if slots == 1:
        return 0.0
    transfer_s = link_bytes(slots) * elements / (EFFICIENCY * gpu.link_rate)
    memory_s = node_bytes(slots) * elements / (EFFICIENCY * gpu.memory_rate)
    return max(transfer_s, memory_s) + transfer_s


def moved_bytes(slots: int) -> float:
    """Return the bytes per element that a slot reads and writes to send means to their owners.

    Averages during the backward pass need this step: each slot averages an equal piece of a bucket,
    which lies in one shard as a rule, and all of its pieces go to the owner of this shard.
    """
    return 2 * ELEMENT * (slots - 1) / slots**2


def visible_node_seconds(gpu: Gpu, what: Subject, compute_s: float) -> float:
    """Return the seconds of averages and gathering in a node that do not overlap with computing.

    As for DistributedDataParallel, all buckets but the last overlap with the backward pass of the
    last part of a batch. The last bucket is the one with the first parameter, whose gradient is the
    last one, or this parameter, if it is larger. The link of the owner of a bucket transfers its
    bytes twice: gradients between all slots, then the means. Sums and transfers of a bucket follow
    each other. For the package's models, gathering overlaps with the forward pass of the first part
    of a batch, except for the bucket of the first parameter; a gathered bucket passes through all
    slots in a chain, and so crosses each link once.

    :param gpu: the GPU
    :param what: the job and its sizes
    :param compute_s: seconds of the forward and backward passes of a step
    """
    slots = what.slots
    elements = what.flat.size
    link_s = elements / (EFFICIENCY * gpu.link_rate)
    memory_s = elements / (EFFICIENCY * gpu.memory_rate)
    first = what.module.tensors[0] / what.module.element_size if what.module.tensors else 0.0
    last = min(1.0, max(1e6 * what.job.node.bucket_mb / ELEMENT, first) / elements)
    average_s = 2 * link_bytes(slots) * link_s + (node_bytes(slots) + moved_bytes(slots)) * memory_s
    gather_s = link_bytes(slots) * link_s
    pass_s = compute_s / what.job.algorithm.accumulate
    hidden_s = min((1 - last) * average_s, BACKWARD * pass_s)
    if what.module.tensors and allows_gather(what.job):
        gather_s = ELEMENT * link_s
        hidden_s += min((1 - last) * gather_s, (1 - BACKWARD) * pass_s)
    return average_s + gather_s - hidden_s


def uses_buckets(what: Subject) -> bool:
    """Return whether a job averages gradients in a node during the backward pass."""
    own_gpu = len(slots_of(what.job.node.devices)) == 1 < what.slots
    return own_gpu and allows_buckets(what.job)


def local_step(job: Job) -> str:
    """Return the name of the job's local step; "" if its algorithm has no separate one."""
    spec = spec_of(BUILDERS, job.algorithm.name)
    implied = spec.implies.get("local.name", "") if spec else ""
    return job.local.name or str(implied)


def style_of(job: Job) -> str:
    """Return the style of the job's algorithm, "atc" or "awc"; "" if it has none."""
    spec = spec_of(BUILDERS, job.algorithm.name)
    options = keyword_only(spec.build)[0] if spec else {}
    if "style" not in options:
        return ""
    _, default = options["style"]
    return str(job.algorithm.options.get("style", default))


def update_of(job: Job) -> Update:
    """Return the counts of the job's algorithm.

    :param job: the job, whose algorithm, style and local step are the key in `UPDATES`
    :raises JobError: if `UPDATES` has no such entry
    """
    key = job.algorithm.name, style_of(job), local_step(job)
    if key not in UPDATES:
        counted = ", ".join(" ".join(filter(None, known)) for known in UPDATES)
        name = " ".join(filter(None, key))
        raise JobError(
            f"--gpu has no byte counts for the algorithm, style and local step {name}, only for: "
            f"{counted}. Pass the time of the update by --update T instead of --gpu"
        )
    return UPDATES[key]


def update_seconds(gpu: Gpu, update: Update, slots: int, elements: int) -> float:
    """Return the seconds of the update of each slot's shard.

    :param gpu: rates of the GPU
    :param update: counts of the step
    :param slots: number of shards
    :param elements: number of elements of the model
    """
    nbytes = update.bytes_per_element * elements / slots
    return nbytes / (EFFICIENCY * gpu.memory_rate) + update.operations * LAUNCH_S


def with_gpu(machine: Machine, what: Subject, local: str) -> Machine:
    """Return the machine with the times of a job's step on the GPU that the machine names.

    :param machine: machine; unless it names a GPU, it is returned unchanged
    :param what: the job, whose algorithm decides which bytes are moved, and its sizes
    :param local: name of the local step, with which all-reduce is timed
    :raises JobError: if the time of the update was not given, and `UPDATES` has no entry for the
        algorithm
    """
    if not machine.gpu:
        return machine
    gpu = GPUS[machine.gpu]
    job, slots, elements = what.job, what.slots, what.flat.size
    words = {"update_s": "update", "node_s": "node-local", "combine_rate": "sum"}
    computed = {name for name, word in words.items() if machine.sources.get(word) != "given"}
    values = {"combine_rate": slots * EFFICIENCY * gpu.memory_rate * ELEMENT / SUM_BYTES}
    if job.algorithm.name == "parallel":
        # DistributedDataParallel: its all-reduce averages inside the node, too, and each GPU
        # updates the whole model.
        update = Update(FUSED.get(local, FUSED["adamw"]), 1)
        values["update_s"] = update_seconds(gpu, update, 1, elements)
        values["node_s"] = 0.0
    else:
        if "update_s" in computed:
            values["update_s"] = update_seconds(gpu, update_of(job), slots, elements)
        values["node_s"] = node_seconds(gpu, slots, elements)
        if uses_buckets(what):
            values["node_s"] = visible_node_seconds(gpu, what, machine.compute_s)
    sources = {words[name]: f"data sheet of {machine.gpu}" for name in sorted(computed)}
    changed = machine.with_values({name: values[name] for name in sorted(computed)})
    return replace(changed, sources=machine.sources | sources)
