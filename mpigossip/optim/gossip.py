"""`Gossip`: a torch optimizer whose step also exchanges with neighbouring nodes."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mpigossip.cluster import deadline
from mpigossip.cluster.process import check_process
from mpigossip.cluster.world import World
from mpigossip.config import JobError, removed
from mpigossip.engine.measurements import Record
from mpigossip.engine.module import ModuleParameters
from mpigossip.engine.sharded import plan_layout
from mpigossip.engine.shared_memory import check_separate
from mpigossip.engine.step import Engine
from mpigossip.mixing.base import Mixer
from mpigossip.mixing.device.memory import check_default_device
from mpigossip.optim import arguments, wrappers
from mpigossip.optim import state_dict as states
from mpigossip.optim.averaged import averaged, distance, paused
from mpigossip.optim.inner import (
    StaleGradients,
    check,
    check_group,
    check_method,
    learning_rate,
    optimizer_name,
    unscaled,
)
from mpigossip.optim.node import LoopNode
from mpigossip.optim.run_directory import RunDirectoryMixin, open_log, open_run
from mpigossip.optim.settings import settings
from mpigossip.runs import printer
from mpigossip.runs.node import closing
from mpigossip.runs.survive import Survival, prepare
from mpigossip.training.parts import JobParts

LOADED = "the first call after load_state_dict()"
"""Name of a collective call that a rank makes alone if only it has loaded a state."""


class Gossip(RunDirectoryMixin):
    """Wrap a torch.optim optimizer so that each step also exchanges with neighbouring nodes.

    Each rank is a node::

        with mpigossip.world() as world:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
            optimizer = mpigossip.Gossip(world, model, optimizer, algorithm="dsgd")
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()

    Schedulers, `torch.amp.GradScaler`, clipping and frameworks see ``param_groups``, ``state`` and
    ``defaults`` of the inner optimizer. A node whose gradients overflowed takes no local step and
    joins the exchange. parallel, dsgt and momentum-tracking give every parameter a gradient, zero
    where a node had none; others leave such parameters to the optimizer, which skips them. `record`
    has the metrics of the last step. Rejected, beside what a job rejects:

    * LBFGS, whose curvature pairs averaging invalidates, and other optimizers that need a closure,
      as SAM, which can have ``Gossip`` as its base optimizer; parameters of float64;
    * methods with a momentum of their own (dmsgd, qg-dmsgd, decentlam, detag, defacto) with
      anything but plain SGD, or with several learning rates: they take rate and coupled weight
      decay from it, and never its step;
    * slowmo with several learning rates; a rate of 0 with slowmo, qg-dmsgd and decentlam;
    * cadence "gossip-aga", which measures the loss; "adpsgd" without ``total``, the run's steps;
    * local steps by name (``local``, "accumadam"): the optimizer is the local step;
    * ``step()`` of the inner optimizer, which is part of this one's.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        algorithm: str = "dsgd",
        graph: Any = None,
        cadence: str | None = None,
        wire: str | None = None,
        overlap: Literal["auto", "never"] = "auto",
        mixer: str = "synchronous",
        *,
        measure_every: int | None = None,
        run: str | Path | None = None,
        on_change: Callable[[World], object] | None = None,
        **options: Any,
    ):
        """Let all nodes begin with node 0's model; collective.

        :param world: of :func:`mpigossip.world`
        :param model: all that the optimizer moves, in float32, float16 or bfloat16; several modules
            as a `torch.nn.ModuleList`. Frozen parameters are rank 0's, and join the exchange at the
            step at which they require gradients
        :param optimizer: any of torch.optim, or a list, whose parts step one after the other:
            ``[torch.optim.Muon(matrices), torch.optim.AdamW(others)]``
        :param algorithm: a name as in `algorithm.name` of a job
        :param graph: what :func:`mpigossip.graph` takes, over the nodes; None: the algorithm's
            own, else "one-peer-exponential"
        :param cadence: which steps exchange, `cadence.name`; None: the algorithm's own, else
            "always"
        :param wire: format of a message, `node.wire`; None: "fp32"
        :param overlap: "auto": methods that are ahead exchange during forward and backward, others
            begin with the step; "never": all begin with the step. With "auto", parameters that the
            program changes while they are sent are rejected, but a rare change through `.data` may
            be lost; "never" keeps every change
        :param mixer: "synchronous", or "asynchronous": neighbours' newest models, without waiting
        :param measure_every: steps between two consensus distances in `record`; None: 10 in a run,
            100 there on a GPU, else never
        :param run: the run directory of log, checkpoints and lock; None: nothing is written
        :param on_change: with ``survive=True``, called as ``on_change(world)`` after a rank failure
        :param options: of the algorithm, graph and cadence by their plain names, and the settings
            of a job that the reference lists, such as ``seed``, ``timeout_s`` (seconds) and, with
            ``run``, ``steps``, the whole loop's. A name that two sections have needs its section:
            ``graph_lazy=True``, or ``**{"graph.lazy": True}``
        :raises JobError: on all ranks, with all that doesn't fit, each as in a job
        """
        with world.raise_together(JobError) if hasattr(world, "raise_together") else nullcontext():
            optimizer = arguments.one_optimizer(optimizer)
            arguments.check(world, model, optimizer)
        super().__init__(optimizer)
        self._world = world
        self._given = model
        self._model = wrappers.unwrap(model)
        arguments.check_overlap(overlap)
        where = str(next(self._model.parameters()).device)
        with world.raise_together(JobError, ValueError):
            wrappers.check(model, optimizer, world)
            check(self._model, optimizer)
            check_separate(self._model)
            folder = Path(run) if run else None
            parts = settings(world, where, algorithm, graph, cadence, wire, mixer, folder, options)
            self._job = parts.job
            check_method(parts, optimizer)
            arguments.check_callback(self._job, on_change)
        self._run = open_run(world, self._job) if run else None
        self._begin(parts, overlap, measure_every, on_change)

    def _begin(
        self,
        parts: JobParts,
        overlap: str,
        measure_every: int | str | None,
        on_change: Callable[[World], object] | None,
    ) -> None:
        """Make this rank's node, and prepare it for rank failures; collective."""
        world = self._world
        run = self._run
        self._loaded: dict | None = None
        self._stale = StaleGradients()
        self.record: Record | None = None
        """metrics of the last step"""
        if self._job.run.survive:
            prepare(self._job, world)
        if measure_every is None:
            measure_every = self._job.log.consensus_every if run else 0
        self._node = LoopNode(world, self._model, self._inner, parts, overlap, measure_every)
        if run is not None:
            run.node = self._node
        self._survival: Survival | None = None
        if on_change is not None and world.survives:
            self._survival = Survival(self._node, run, on_change)
            self._node.catch_failure = self._survival.catch_failure
        self._open = [self]  # once closed, the world keeps no model alive
        world.resources.callback(_close, self._open)
        arguments.report_setup(world, self._model, self._inner)

    # -- a torch optimizer ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        plain = f"'{type(self).__name__}' object has no attribute '{name}'"
        inner = self.__dict__.get("_inner")
        if inner is not None and hasattr(inner, name):
            plain += (
                f": it is of {optimizer_name(inner)}, the inner optimizer, whose own attributes "
                f"the program "
                "reads from that. An optimizer that calls another one's step() can have Gossip "
                "as its base optimizer (mpigossip/optim/README.md, Sharpness-aware minimization)"
            )
        raise AttributeError(removed.of_argument(name) or plain)

    def __repr__(self) -> str:
        return f"Gossip[{self._job.algorithm.name}, {self._node.graph.name}] {self._inner!r}"

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a ``group`` of the model's parameters, such as thawed ones; as in torch."""
        check_group(self._node.known, group)
        self._inner.add_param_group(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step and run the scheduled exchange; synchronous mixers wait for neighbours.

        :param closure: evaluated once, with gradients; its value is returned
        :raises WaitTimeoutError: where a neighbour doesn't come within ``timeout_s`` seconds
        :raises JobError: where ranks differ in layout or calls, or a message isn't finite; in a
            fork of the process that opened the world
        """
        check_process()
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        deadline.steps_done = self.steps
        ordered = self.mixer.synchronous  # otherwise ranks make other numbers of steps
        with torch.no_grad(), deadline.user_call("step()", ordered):
            if self._survival is None:
                self._step()
            else:
                self._survival.step(self._step)
        deadline.steps_done = self.steps
        return value

    def _step(self) -> None:
        node = self._node
        engine = self._ready_engine()
        if engine.clock.counting:
            engine.clock.lap("compute_s")
        if self._run:
            with engine.clock.uncounted():
                open_log(self._run)
                self._run.close_step()
        node.check()
        node.edits.end()
        engine = node.engine
        self._stale.check(node.vector.rows[0], self._world.rank)
        skipped = unscaled(self, engine, node.vector)
        lr = learning_rate(self._job.algorithm.name, self._inner, self.steps)
        node.gather()
        if skipped and not engine.method.raw:
            node.vector.g[0].zero_()
        self._stale.mark_used()
        self.record = engine.step(lr, skipped)
        node.publish()
        if self._survival is not None:
            self._survival.keep()
        if self._run:
            self._run.record_step(self.record)
        engine.clock.begin()
        node.send_early()

    def _ready_engine(self) -> Engine:
        """The engine, where it is to go on from."""
        if self._node.closed:
            raise JobError(
                "this Gossip is closed, as its world is: call it inside the block "
                "`with mpigossip.world() as world:`"
            )
        check_process()
        check_default_device(deadline.current_call or "Gossip")
        if self._loaded is not None:
            with deadline.user_call(LOADED, ordered=self.mixer.synchronous):
                return self._resumed()
        return self._resumed()

    def _resumed(self) -> Engine:
        """The engine, laid out at the first step, and with the state that was loaded."""
        first = not self._node.laid_out
        anew = first or self._loaded is not None
        if anew and self.mixer.synchronous:
            states.check_step(self._world, self._loaded)
        if first:
            self._node.lay_out()
            self._stale.watch(p for group in self.param_groups for p in group["params"])
        if self._loaded is not None:
            states.check_method(self._world, self._loaded, self.engine)
            name = self._job.algorithm.name
            states.check_origin(self._node.world, self._loaded, self.engine, name)
            self._node.restart_exchanges()
            state = self._loaded
            self._loaded = None
            states.restore(state, self.engine, self.vector)
            with torch.no_grad():
                self._node.publish()
        if anew and self._survival is not None:
            self._survival.keep()
        return self.engine

    # -- where everything lies ------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps done so far; after a rank failure the last that all survivors have done."""
        return self.engine.index if self._node.laid_out else 0

    def surviving(self) -> AbstractContextManager[None]:
        """Context manager for own collective calls; after a failure the next step goes on."""
        return self._node.catch_failure()

    @property
    def engine(self) -> Engine:
        """The engine, once the first step has begun."""
        return self._node.engine

    @property
    def mixer(self) -> Mixer:
        """The communication backend between nodes."""
        return self._node.mixer

    @property
    def vector(self) -> ModuleParameters:
        """The trained parameters in flat memory, once the first step has begun."""
        return self._node.vector

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's, and as "gossip" this node's model, method and counters.

        Buffers are the model's own state. Not collective, but while a fragment is on its way: then
        on all ranks of the node. Save one for each node: another node's would put this one in its
        place.
        """
        self._node.check_not_paused("state_dict()")
        check_default_device("state_dict()")
        self._run_hooks("state_dict_pre")
        mine = self._loaded
        if mine is None and self._node.laid_out:
            self._node.edits.collect(self.vector)
            mine = states.state(self.engine, self.vector, self._node.world) | {
                "optimizer": optimizer_name(self._inner)
            }
        state = self._inner.state_dict() | {"gossip": mine}
        return self._run_hooks("state_dict_post", state) or state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bitwise from ``state_dict``, this node's own, at the next step; on all nodes.

        The next step reports once if the state is another node's, and raises JobError if the
        method needs the state of each node.
        """
        self._node.check_not_paused("load_state_dict()")
        check_default_device("load_state_dict()")
        state_dict = self._run_hooks("load_state_dict_pre", state_dict) or state_dict
        given = dict(state_dict)
        mine = given.pop("gossip", None)
        # before the first step the model may have changed since it was planned
        flat = self._node.flat if self._node.laid_out else plan_layout(self._node.model)
        told = states.load(given, mine, self._inner, self._node.model, flat.local_layout)
        if told and self._world.rank == 0:
            printer.print_line(f"load_state_dict: {'; '.join(told)}")
        self._loaded = mine
        self._run_hooks("load_state_dict_post")

    # -- all nodes ---------------------------------------------------------------------

    def average(self) -> None:
        """Exchange without a step, while waiting for others (asynchronous mixers)."""
        self._ready_engine()
        self._node.average()

    def paused(self) -> AbstractContextManager[None]:
        """Context manager for long work of this rank, such as an evaluation on rank 0.

        Neighbours wait beyond ``timeout_s``; asynchronous ones go on, and this node with them.
        """
        return paused(self._node)

    @contextmanager
    def averaged(
        self, twin: nn.Module | None = None, *, recalibrate: Iterable | None = None
    ) -> Iterator[Any]:
        """Context manager in which the model is the exact average over nodes, for evaluation.

        Collective: on all ranks, also where one of them evaluates. Nothing is trained inside.
        Parameters and floating-point buffers are averaged, BatchNorm's statistics among them.

        :param twin: a module that is averaged and returned instead, such as an EMA of the model
        :param recalibrate: batches of this node, from which the averaged model finds BatchNorm's
            mean and variance anew before those are averaged: tensors, pairs (inputs, targets),
            mappings, whose entries are passed by name if ``forward`` has them, or objects with a
            method ``to(device)``, such as graphs
        """
        self._ready_engine()
        other = None if twin is None or twin is self._given else arguments.one_module(twin, "twin")
        with averaged(self._node, other, recalibrate):
            yield self._given if other is None else twin

    def consensus_distance(self) -> float:
        """Return (1/n) Σ_i ‖x_i − x̄‖² / ‖x̄‖²; collective."""
        self._ready_engine()
        return distance(self._node)

    def close(self) -> None:
        """Free windows and threads; collective. The world does it at its end."""
        check_process()
        # asynchronous nodes, and survivors, take part in what others do until all have ended
        alone = self.mixer.synchronous and not self._world.survives
        word = deadline.CLOSING if alone else deadline.WAITING
        # the program's default device, which may be "meta", is none of what is written at the end
        with torch.device("cpu"), torch.no_grad(), deadline.announce_end(self.steps, word):
            self._end()
        self._stale.release()
        self._open.clear()

    def _end(self) -> None:
        run = self._run
        with closing(self._node, self._world):
            # exit() may be called where the program handles an exception of its own
            if run is not None and sys.exception() is not None and not run.stopped:
                run.abandon()
            if self._survival is not None:
                self._survival.leave()
            elif run is not None:
                run.finish()


def _close(kept: list[Gossip]) -> None:
    for one in [*kept]:
        one.close()
