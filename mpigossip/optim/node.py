"""Node of a custom loop: model, torch optimizer, mixer and engine."""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mpigossip import config
from mpigossip.algorithms.base import Step, no_state
from mpigossip.algorithms.local import Local
from mpigossip.algorithms.methods import DIVIDES, KEEPS_MODEL, takes_local
from mpigossip.cluster import deadline
from mpigossip.cluster.process import report_unused
from mpigossip.cluster.world import World
from mpigossip.config import Job, JobError
from mpigossip.config.readable import format_bytes, print_note, print_note_once
from mpigossip.engine.gathered import Gathered
from mpigossip.engine.module import ModuleParameters
from mpigossip.engine.sharded import ShardedLayout, ShardedParameters, plan_layouts
from mpigossip.engine.step import Engine
from mpigossip.groups.base import Group, Single
from mpigossip.groups.devices import make_group
from mpigossip.mixing import close_mixer
from mpigossip.mixing.base import MessageLayout, Mixer
from mpigossip.optim import initial_sync, state, state_dict, wrappers
from mpigossip.optim.arguments import parameter_list, report_shared_device
from mpigossip.optim.edits import EditDetector
from mpigossip.optim.inner import (
    OptimizerState,
    StepGuard,
    check,
    decay,
    first_rate,
    local_step_from_optimizers,
    optimizer_name,
)
from mpigossip.runs.node import Arrays, Numbers
from mpigossip.runs.overview import between, nodes
from mpigossip.runs.progress import Progress
from mpigossip.store.checkpoint import Manifest, NodeState, Number
from mpigossip.training.parts import JobParts, make_graph, make_parts
from mpigossip.training.rules import check_rounds, state_warning

SECTIONS = ("run", "algorithm", "graph", "cadence", "node", "checkpoint", "log")
"""Sections of a job that a custom loop has, too."""

THAWED = "the step() at which parameters were thawed"
"""Name of a collective call. If parameters are thawed on some ranks only, the other ranks do not
make the call, and the error message about that contains this name.
"""


class LoopNode:
    """Node of a rank in a custom loop, an implementation of :class:`mpigossip.runs.node.Node`.

    The first step creates the flat parameters. Until then, the program may convert the model or
    move it to another device.
    """

    vector: ModuleParameters
    engine: Engine
    mixer: Mixer
    parts: JobParts
    local: Local
    _frozen: state.FrozenParameters
    shift = 0
    counts_all = False
    facts: dict[str, Any] = {"door": "loop"}

    def __init__(
        self,
        world: World,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        parts: JobParts,
        overlap: str,
        measure_every: int | str,
    ):
        """Copy node 0's model to all nodes, after checking that their layouts agree; collective.

        :param world: all ranks
        :param model: model of the program
        :param inner: its torch optimizer
        :param parts: parts of the job that is equivalent to the arguments of `Gossip`
        :param overlap: "auto": exchange during the backward pass if the algorithm can; "never": not
        :param measure_every: steps between two measurements of the consensus distance, or "auto"
        :raises JobError: on all ranks, if models or settings differ between ranks
        """
        self.world = world
        self.model = model
        self.inner = inner
        self.job = parts.job
        self.graph = parts.graph
        self._overlap = overlap
        self._every = measure_every
        self.edits = EditDetector()
        self.laid_out = self.evaluating = self.serving = self.closed = False
        self._facts = initial_sync.layout(model)
        initial_sync.check_equal(world, [*initial_sync.settings_of(self.job), *self._facts])
        check_rounds(self.job, self.graph, world)
        self.catch_failure: Callable[[], AbstractContextManager[None]] = nullcontext
        """Function that returns a context manager, whose block ends without an error after a rank
        failure that the node survives.
        """
        self._open()
        initial_sync.broadcast_model(world, model)
        self.keeps: dict[str, Any] = {}
        """Objects with state_dict() or get_state() that checkpoints include."""
        self.known = {id(p): p for p in model.parameters()}
        """Parameters, by id, that the model had when Gossip was created."""
        self.guard = StepGuard(inner)
        atexit.unregister(report_unused)

    def _open(self) -> None:
        """Open the mixer and the group for the present model; collective."""
        self._device = str(next(self.model.parameters()).device)
        report_shared_device(self.world, self._device)
        self.layouts = plan_layouts(self.model)
        self.flat = self.layouts.node
        single = Single(self._device)
        self.group: Group = single
        local = Local(no_state, self._adapt, raw=True)
        shard = self.layouts.slot
        self.parts = make_parts(
            self.job,
            self.graph,
            self.flat,
            shards=range(shard, shard + 1),
            devices=(self._device,),
            local=local,
            frozen=[name for name, p in self.model.named_parameters() if not p.requires_grad],
        )
        if self.world.rank == 0 and (warning := state_warning(self.parts)):
            print_note_once(warning)
        node = self.job.node
        nodes = self.world.nodes
        # An asynchronous mixer has nothing to do if there are no other nodes.
        mixer = "synchronous" if self.world.comm is None else node.mixer

        def gather(layout: MessageLayout, make: Callable[[MessageLayout], Mixer]) -> Mixer:
            return Gathered(layout, self.group, make)

        if self.sharded and nodes.per_node > 1:
            from mpigossip.groups.ranks import NeverGathered  # this import needs MPI

            self.mixer = self.parts.open_mixer(nodes.inter_node, mixer=mixer)
            self.group = NeverGathered(single, nodes.intra_node)
        elif nodes.per_node == 1:
            self.mixer = self.parts.open_mixer(nodes.inter_node, mixer=mixer)
        else:
            threads = torch.get_num_threads()
            self.group = make_group((self._device,), threads, True, node.timeout_s, self.world)
            self.mixer = self.parts.open_mixer(nodes.inter_node, mixer=mixer, wrap=gather)
        self._segments: Group = self.group if self.sharded else single

    def _adapt(
        self, x: torch.Tensor, g: torch.Tensor | None, state: Any, step: Step, out: torch.Tensor
    ) -> Any:
        """Take the step of the torch optimizer; :class:`Local` explains the parameters.

        The algorithm and the mixer are made before the flat parameters exist, on which the real
        local step depends. They therefore get this method, which reads ``self.local`` only when a
        step is taken.
        """
        return self.local.adapt(x, g, state, step, out)

    def _shut(self) -> None:
        """Close the mixer and the group; collective."""
        close_mixer(self.mixer)
        self._segments.close()

    @property
    def sharded(self) -> bool:
        """True if each rank of the node has a shard of the model."""
        return isinstance(self.flat, ShardedLayout)

    def buffers(self, row: int) -> list[dict[str, torch.Tensor]]:
        return [dict(self.model.named_buffers())]

    def extra_state(
        self, row: int, world: World
    ) -> tuple[dict[str, np.ndarray], dict[str, Number]]:
        nodes = self.world.nodes
        arrays: dict[str, np.ndarray] = {}
        numbers: dict[str, Number] = {"ranks": nodes.per_node}
        # If the model has been converted since the last step, save the model of that step.
        with suppress(JobError):
            self.edits.collect(self.vector)
        with world.raise_together(JobError):
            rank_state = state.of_rank(self.model, self.keeps)
            if nodes.is_leader:
                self._frozen.write(self.flat.names, arrays)
            if nodes.is_leader and not self.sharded:
                numbers["torch"] = state.write_optimizer(self.inner, self.model, arrays)
        if self.sharded:  # the ranks gather the state of one parameter at a time
            with torch.no_grad():
                into = arrays if nodes.is_leader else None
                numbers["torch"] = state.write_optimizer(self.inner, self.model, into)
        rank_arrays, rank_numbers = state.of_node(rank_state, self.world)
        return (arrays | rank_arrays, numbers | rank_numbers) if nodes.is_leader else ({}, {})

    def restore_extra_state(self, row: int, saved: NodeState, mean: Arrays | None) -> list[str]:
        arrays = saved.arrays if mean is None else mean
        nodes = self.world.nodes
        text = str(saved.numbers["torch"])
        inner_state, lacking = state.read_optimizer(self.inner, self.model, text, arrays)
        settings = state_dict.load(inner_state, None, self.inner, self.model, self.layouts.local)
        frozen = self._frozen.read(arrays)
        if mean is None:
            state.load_random(saved, nodes.local_rank, self.model)
            dropped = state.dropped_ranks(saved, nodes.per_node)
            draws = nodes.is_leader or not dropped
            return settings + state.load_kept(saved, nodes.local_rank, self.keeps, draws) + dropped
        kinds = sorted({name.rpartition("/")[2] for name in mean if name.startswith("torch/")})
        messages = [f"averaged state of the optimizer: {', '.join(kinds)}"] if kinds else []
        if frozen:
            messages.append(f"averaged: frozen {parameter_list(frozen)}")
        if lost := state.frozen_names(saved.arrays.keys() - mean.keys()):
            messages.append(f"dropped: frozen {parameter_list(lost)}, which not all nodes changed")
        if lacking:
            messages.append(f"dropped: the optimizer's state of {', '.join(lacking[:4])}")
        messages.append("dropped: random numbers")
        return messages + settings + state.load_kept(saved, 0, self.keeps, draws=False)

    def watch_frozen(self) -> None:
        """Prepare to save frozen parameters that the program changes from now on."""
        self._frozen = state.FrozenParameters(self.model)

    def resumes_exactly(self, manifest: Manifest, first: NodeState) -> bool:
        """Return whether nodes had the same number of ranks, or have no buffers."""
        same_ranks = manifest.meta.get("slots") == self.world.nodes.per_node
        return same_ranks or not any(name.startswith("buffers/") for name in first.arrays)

    def check_saved(self, manifest: Manifest, path: Path) -> None:
        """Accept any checkpoint, because the program partitions the data."""

    def restore_counters(self, numbers: Numbers, facts: Mapping[str, Any]) -> None:
        self.engine.restore_counters(numbers)

    def lay_out(self) -> None:
        """Create the engine, and the flat parameters of the model as it is now; collective.

        :raises JobError: if DDP or FSDP was applied to the model in a way that Gossip does not
            support, if the layouts of the ranks differ, or if trained parameters were added after
            Gossip was created
        """
        wrappers.check_late(self.model, self.world)
        facts = self._facts
        self._facts = initial_sync.layout(self.model)
        # Asynchronous ranks do not make a collective call without need, which would let them wait.
        if self.mixer.synchronous or facts != self._facts:
            initial_sync.check_equal(self.world, self._facts)
        device = str(next(self.model.parameters()).device)
        if device != self._device or self.layouts != plan_layouts(self.model):
            self._shut()
            self._open()
        self.check_known()
        flat, local_layout, slot = self.layouts
        if isinstance(flat, ShardedLayout):
            self.vector = ShardedParameters(self.model, flat, local_layout, slot)
        else:
            self.vector = ModuleParameters([self.model])
        self._build()
        self.laid_out = True

    def check_known(self) -> None:
        """Raise JobError if trained parameters were added to the model after Gossip was created.

        The checks of :func:`~mpigossip.optim.inner.check` are repeated, too.
        """
        check(self.model, self.inner)
        new = [(n, p) for n, p in self.model.named_parameters() if id(p) not in self.known]
        if late := [n for n, p in new if p.requires_grad]:
            raise JobError(
                f"{parameter_list(late)} were added to the model after Gossip was created, and "
                "would never be exchanged: add them before Gossip(…)"
            )

    def _build(self) -> None:
        self.local = local_step_from_optimizers(self.vector, [self.inner], self.guard)
        arrays = OptimizerState(self.vector, [self.inner])
        self.engine = self.parts.make_engine(
            self.mixer, self._segments, self.vector, self._every, arrays
        )

    def restart_exchanges(self) -> None:
        """Open the mixer again, with no exchange in flight, so that any round may follow.

        A mixer that has exchanged nothing stays open. The call is collective over all nodes.
        """
        # The rounds of a synchronous mixer must be consecutive.
        waits = self.mixer.synchronous
        if self.engine.index or self.edits.in_flight or (waits and self.engine.round):
            self._shut()
            self._open()
            self.engine.group = self._segments
            self.engine.replace_mixer(self.mixer)
            self.edits.end()

    def lay_out_again(self, names: list[str]) -> None:
        """Create the flat parameters again, with parameters that were frozen before; collective.

        The state of the algorithm is initialized again.

        :param names: names of the parameters that were frozen before
        """
        before = self.engine
        drops = bool(self.engine.parts())
        before.wait_exchange()
        rows = self.vector.cut(before.vector.x[0][0])
        masters = dict(zip(self.vector.flat.names, rows, strict=True))
        self.lay_out()
        for name, now in zip(self.flat.names, self.vector.cut(self.vector.x[0][0]), strict=True):
            now.copy_(masters.get(name, now))  # 16-bit parameters of the model are rounded
        self.engine.restart()  # the state may contain copies of x
        self.edits.end()
        numbers = before.numbers() | {"born": before.index}
        if "phases" in self.engine.method.needs:
            # Only a whole period of the graph, from its first round on, computes the average.
            numbers["round"] = 0
        self.engine.restore_counters(numbers)
        self.mixer.bytes_sent[:] = before.mixer.bytes_sent
        if self.world.rank == 0:
            reset = "; the state of the algorithm is reset" if drops else ""
            print_note(
                f"step {before.index}: {parameter_list(names)} require gradients now, and are "
                f"exchanged from this step on{reset}"
            )

    def rebuild(self, world: World) -> None:
        self.world, self.graph = world, make_graph(self.job, world.size)
        self.edits.end()
        self._open()
        self._build()

    def copy_step_extras(self, spare: Any) -> Any:
        return state.copied(self.inner, spare or [])

    def restore_step_extras(self, extras: Any, world: World) -> list[str]:
        state.put_back(self.inner, extras)
        return state.average_state(world, self.mixer, self.inner)

    @property
    def assembly(self) -> LoopNode:
        return self

    def progress_fields(self) -> dict[str, Any]:
        text = loop_text(self.job, self.model, self.inner, self.flat.names)
        return {"total_steps": self.job.run.steps or 0, "text": text}

    def overview_lines(self, progress: Progress) -> list[tuple[str, str]]:
        job = self.job
        count = self.flat.count
        cadence = "" if job.cadence.name == "always" else f", cadence {job.cadence.name}"
        method = f"{job.algorithm.name} ({optimizer_name(self.inner)}) on {job.graph.name}{cadence}"
        model = f"{type(self.model).__name__}, {count:,} parameters, {format_bytes(4 * count)}"
        device = str(next(self.model.parameters()).device)
        return [
            ("nodes", nodes(self.mixer.n, [device], self.world)),
            ("model", model),
            ("method", method),
            *between(self.engine, self.graph, job.node, self.world),
            (
                "files",
                f"{job.run.folder}: log.h5 every {job.log.flush_steps} steps, checkpoints/ "
                "by save() and at the end",
            ),
        ]

    def summary(self, progress: Progress) -> dict[str, Any]:
        """Return no summary, because the program logs its own metrics."""
        return {}

    def check(self) -> None:
        """Move all trained parameters to the flat memory, for example after a call of model.to().

        If parameters that were frozen require gradients now, the call is collective and replaces
        the flat memory and the engine.

        :raises JobError: if parameters were changed while they were in flight, or were added,
            replaced or converted; or inside averaged() or an asynchronous pause
        """
        self.check_not_paused("step()")
        if any(id(p) not in self.known for g in self.inner.param_groups for p in g["params"]):
            self.check_known()
        self.edits.collect(self.vector)
        if names := self.vector.newly_trained():
            with deadline.user_call(THAWED):
                self.lay_out_again(names)
        self.edits.check()

    def send_early(self) -> None:
        """Start the next exchange early, if the algorithm can, to overlap it with backward."""
        if self._overlap == "auto" and self.engine.method.ahead and self.mixer.synchronous:
            self.engine.ahead()
            self.edits.begin(self.vector, self.engine.sent_x)
        else:
            self._reject_edits_of_kept_model()

    def _reject_edits_of_kept_model(self) -> None:
        """Let the next step reject edits, if the method overwrites them with its own model."""
        name = self.job.algorithm.name
        if name in KEEPS_MODEL:
            self.edits.begin(
                self.vector,
                lambda: [x.clone() for x in self.vector.x],
                f'parameters were changed between two steps, and algorithm.name = "{name}" would '
                "overwrite them with the model in its state: do not change them there, or use "
                'algorithm = "dsgt"',
            )

    def gather(self) -> None:
        """Copy the gradients to the flat gradients g, unless the algorithm is ``raw``.

        The optimizer of a raw algorithm reads ``.grad``. If the algorithm replaces the local step,
        or is custom, SGD's weight decay is added to g.

        :raises JobError: if the algorithm would move parameters that were frozen after the first
            step
        """
        name = self.job.algorithm.name
        if not self.engine.method.raw:
            self.vector.gather()
            if not takes_local(name):
                if names := self.vector.newly_frozen():
                    raise JobError(
                        f'{parameter_list(names)} are frozen now, and algorithm.name = "{name}" '
                        'would continue to move them by its own update: use algorithm = "dsgd", '
                        "whose optimizer does not change frozen parameters"
                    )
                decay(self.vector, self.inner)

    def publish(self) -> None:
        self.vector.publish()

    def average(self) -> None:
        self.check_not_paused("average()")
        whole = self.parts.cadence.fragment_schedule.is_whole_model
        if not whole or self.job.algorithm.blend is not None:
            raise JobError(
                "average(): with fragments, a delay or a blend, the step decides what is sent: "
                "remove the call, or remove fragments, delay and blend from Gossip(…)"
            )
        if self.engine.in_flight:  # its neighbours would wait for this node, and this node for them
            raise JobError(
                "average(): the next step's exchange is in flight, because this algorithm sends "
                'before the gradient exists: pass Gossip(…, overlap="never")'
            )
        self.collect_edits()
        # The exchange changes x. The detector must not report this as an edit of the program.
        restarts = self.edits.in_flight
        self.edits.end()
        self.vector.gather()
        self.exchange()
        self.publish()
        if restarts:
            self._reject_edits_of_kept_model()

    def collect_edits(self) -> None:
        """Move edited parameters to the flat memory, before an exchange without a step.

        :raises JobError: if the step would reject the edits
        """
        self.edits.collect(self.vector)
        self.edits.check()

    def exchange(self) -> None:
        """Exchange without a step, unless the algorithm would divide by a learning rate of 0."""
        lr, _ = first_rate(self.inner)
        if lr or self.job.algorithm.name not in DIVIDES:
            self.engine.average(lr)

    def check_not_paused(self, call: str) -> None:
        """Raise JobError inside averaged(), and inside paused() if it exchanges in a thread."""
        if self.evaluating:
            raise JobError(
                f"{call} inside averaged(): the model, or its twin, is the average there, and is "
                "restored when the block ends: end the block first"
            )
        if self.serving:
            raise JobError(
                f"{call} inside paused(): an asynchronous node continues to exchange there, in a "
                "thread: end the block first"
            )

    def close(self, together: bool) -> None:
        self.guard.release()
        if together:
            self._shut()
            self.closed = self.world.comm is not None


def loop_text(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str]
) -> str:
    """Return the settings of a loop and facts about its program as TOML.

    :param job: job with the settings
    :param model: model of the program
    :param optimizer: optimizer of the program
    :param names: names of the trained parameters
    """
    buffers = {name for name, _ in model.named_buffers()}
    saved = model.state_dict().keys()
    loop = {
        "program": " ".join(sys.argv),
        "model": type(model).__name__,
        "optimizer": optimizer_name(optimizer),
        "left_out": len(saved - buffers - set(names)),
        "temporary": sorted(buffers - saved),
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in loop.items()]
    return config.dump(job, SECTIONS) + "\n".join(["\n[loop]", *lines, ""])
