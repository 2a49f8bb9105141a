"""`Gossip`: a torch optimizer that exchanges with neighbouring nodes in each step."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from mpigossip.algorithms.outer_optimizers import setting_of
from mpigossip.cluster import deadline
from mpigossip.cluster.process import check_process
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.config.errors import STOPPED
from mpigossip.engine.measurements import StepMetrics
from mpigossip.engine.module import ModuleParameters
from mpigossip.engine.overlapping_tensors import check_separate
from mpigossip.engine.sharded import plan_layouts
from mpigossip.engine.step import Engine
from mpigossip.mixing.base import Mixer
from mpigossip.mixing.device.memory import check_default_device
from mpigossip.optim import arguments, run_directory, wrappers
from mpigossip.optim import state_dict as states
from mpigossip.optim.averaged import averaged, distance, paused
from mpigossip.optim.callbacks import LIGHTNING, make_callback
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
from mpigossip.optim.settings import settings
from mpigossip.runs import printer
from mpigossip.runs.node import closing
from mpigossip.runs.run import Run
from mpigossip.runs.survive import Survival, prepare
from mpigossip.training.parts import JobParts

LOADED = "the first call after load_state_dict()"
"""Name of a collective call. If only some ranks have loaded a state, the other ranks do not make
the call, and the error message about that contains this name.
"""

HOOKS = [
    f"_optimizer_{call}_{when}_hooks"
    for call in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]
"""Attributes of `torch.optim.Optimizer` with the hooks of a program."""


class Gossip(torch.optim.Optimizer):
    """Optimizer that adds an exchange with neighbouring nodes to each step of another optimizer.

    Each rank is a node, unless :func:`mpigossip.world` forms nodes of several ranks::

        with mpigossip.world() as world:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
            optimizer = mpigossip.Gossip(world, model, optimizer, algorithm="dsgd")
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()

    ``Gossip`` is a `torch.optim.Optimizer` with the ``param_groups``, ``state`` and ``defaults`` of
    the inner optimizer. Learning-rate schedulers, `torch.amp.GradScaler`, gradient clipping and
    training frameworks therefore work as usual. The attribute `record` holds the metrics of the
    last step.

    A node whose gradients overflow skips its local step but takes part in the exchange. The inner
    optimizer skips parameters without a gradient. Algorithms that exchange gradients, such as
    "parallel", "dsgt" and "momentum-tracking", treat a missing one as zero.

    The constructor or :meth:`step` rejects what a job rejects, and also:

    * float64 parameters, and sparse parameters or buffers;
    * LBFGS, because averaging invalidates its curvature pairs;
    * other optimizers that need a closure, such as SAM; make ``Gossip`` the base optimizer of SAM;
    * algorithms with an update of their own (dmsgd, qg-dmsgd, decentlam, detag, defacto), unless
      the optimizer is plain SGD with one learning rate. These algorithms use the learning rate and
      the weight decay of the optimizer, but never its step. Custom algorithms need plain SGD, too;
    * slowmo with several learning rates, and a learning rate of 0 with slowmo, qg-dmsgd or
      decentlam, which divide by it;
    * the cadence "gossip-aga", which needs the loss, and "adpsgd" without ``total``, the number of
      steps of the run;
    * a local step by name (``local``, "accumadam"), because the optimizer is the local step.

    Call ``step()`` of this optimizer only: calling it on the inner optimizer raises JobError.
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
        """Copy node 0's model to all nodes and prepare the exchange; collective.

        :param world: the result of :func:`mpigossip.world`
        :param model: module with all parameters of the optimizer; those that are trained are
            float32, float16 or bfloat16. Pass several modules as a `torch.nn.ModuleList`. Frozen
            parameters are copied from rank 0, and are exchanged from the step on in which they
            require gradients
        :param optimizer: a torch.optim optimizer, or a list of optimizers that step one after the
            other, as in ``[torch.optim.Muon(matrices), torch.optim.AdamW(others)]``
        :param algorithm: name of the algorithm, as `algorithm.name` in a job
        :param graph: graph over the nodes, in any form that :func:`mpigossip.graph` accepts; None:
            the default of the algorithm, which is "one-peer-exponential" for most
        :param cadence: rule that decides which steps exchange, as `cadence.name` in a job; None:
            the default of the algorithm, which is "always" for most
        :param wire: format of messages, as `node.wire` in a job; None: "fp32"
        :param overlap: "auto": algorithms that are ahead exchange during forward and backward, all
            others within the step; "never": all algorithms exchange within the step. With "auto",
            it is an error to change parameters while they are being sent, but a rare change through
            `.data` may be lost without an error; "never" keeps every change
        :param mixer: "synchronous", or "asynchronous" to average with the newest models of the
            neighbours without waiting for them
        :param measure_every: number of steps between two measurements of the consensus distance in
            `record`; None: 10 (100 on a GPU) with ``run``, no measurement without it
        :param run: run directory for the log, checkpoints and the lock; None: nothing is written
        :param on_change: function that is called as ``on_change(world)`` after a rank failure;
            required with ``survive=True``
        :param options: options of the algorithm, the graph and the cadence by their names without
            the section, and further settings of a job that the reference lists, such as ``seed``,
            ``timeout_s`` in seconds or, together with ``run``, ``steps``, the number of steps of
            the loop. Add the section to a name that two sections have: ``graph_lazy=True``, or
            ``**{"graph.lazy": True}``. ``outer`` of "diloco" also accepts a torch optimizer of the
            model's parameters, whose settings are read now, or a `functools.partial` of its class
        :raises JobError: on all ranks, if arguments or options are invalid or exclude each other;
            the message has one paragraph for each problem
        """
        with world.raise_together(JobError) if hasattr(world, "raise_together") else nullcontext():
            optimizer = arguments.one_optimizer(optimizer)
            arguments.check(world, model, optimizer)
        # `torch.optim.Optimizer.__init__` is not called, because it would create new groups.
        for name in HOOKS:
            setattr(self, name, OrderedDict())
        self._patch_step_function()
        self._inner = optimizer
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
            if options.get("outer") is not None:
                trained = [p for p in self._model.parameters() if p.requires_grad]
                options["outer"] = setting_of(options["outer"], trained)
            parts = settings(world, where, algorithm, graph, cadence, wire, mixer, folder, options)
            self._job = parts.job
            check_method(parts, optimizer)
            arguments.check_callback(self._job, on_change)
        self._run: Run | None = run_directory.open_run(world, self._job) if run else None
        self._begin(parts, overlap, measure_every, on_change)

    def _begin(
        self,
        parts: JobParts,
        overlap: str,
        measure_every: int | str | None,
        on_change: Callable[[World], object] | None,
    ) -> None:
        """Create the node of this rank and prepare it for rank failures; collective."""
        world = self._world
        run = self._run
        self._loaded: dict | None = None
        self._stale = StaleGradients()
        self.record: StepMetrics | None = None
        """Metrics of the last step; None before the first one."""
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
        self._open = [self]  # emptied by close(), so that the world keeps no model alive
        world.resources.callback(_close, self._open)
        arguments.report_setup(world, self._model, self._inner)

    # -- a torch optimizer ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        message = f"'{type(self).__name__}' object has no attribute '{name}'"
        inner = self.__dict__.get("_inner")
        if inner is not None and hasattr(inner, name):
            message += (
                f": it belongs to {optimizer_name(inner)}, the inner optimizer: read it from that "
                "optimizer. An optimizer that calls the step() of another one can "
                "have Gossip as its base optimizer (mpigossip/optim/README.md, Sharpness-aware "
                "minimization)"
            )
        raise AttributeError(message)

    def __repr__(self) -> str:
        return f"Gossip[{self._job.algorithm.name}, {self._node.graph.name}] {self._inner!r}"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True, which lets GradScaler call step() even if gradients overflowed.

        Without this call, the neighbours would wait for this node's message. For Lightning the
        value is False, because Lightning concludes from True that gradients can't be clipped, even
        without a scaler. It then divides the gradients by the scale itself, and step() does not
        divide them again.
        """
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return asking.partition(".")[0] not in LIGHTNING

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the inner optimizer."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """State of the inner optimizer."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the inner optimizer."""
        return self._inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, with ``set_to_none`` as in torch."""
        self._inner.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        """Raise JobError, because `copy` and `pickle` are not supported."""
        raise JobError("Gossip can't be copied or pickled: use optimizer.state_dict() instead")

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a ``group`` of the model's parameters, such as formerly frozen ones, as in torch.

        :raises JobError: if a parameter was not in the model when this Gossip was created, or if it
            was created with several optimizers
        """
        check_group(self._node.known, group)
        self._inner.add_param_group(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step and run the scheduled exchange; synchronous mixers wait for neighbours.

        :param closure: function that is called once, with gradients enabled; its value is returned
        :raises WaitTimeoutError: if a neighbour does not answer within ``timeout_s`` seconds
        :raises NonFiniteError: if this node would send NaN or infinite values
        :raises JobError: if ranks differ in layout or calls; if the gradients of the step before
            were not cleared, or parameters were changed while they were in flight; inside
            :meth:`averaged`, or inside :meth:`paused` if the node is asynchronous; if this Gossip
            is closed; or in a fork of the process that opened the world
        """
        check_process()
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        deadline.this_rank.steps = self.steps
        ordered = self.mixer.synchronous  # asynchronous ranks may make different numbers of steps
        with torch.no_grad(), deadline.user_call("step()", ordered):
            if self._survival is None:
                self._step()
            else:
                self._survival.step(self._step)
        deadline.this_rank.steps = self.steps
        return value

    def _step(self) -> None:
        """Take one step of the algorithm: gradients, local step with exchange, new model.

        The inner optimizer's step() is called at the end of a chain of calls. For dsgd, whose
        message is the model after the local step, a step that exchanges runs through

        1. this method, which calls :meth:`Engine.step` (engine/step.py). x, the flat parameters,
           holds the model at which the gradients were computed. g, the flat gradients, is filled
           from ``.grad`` unless the algorithm is ``raw`` (see :meth:`_take_gradients`);
        2. `WholeExchange.send` (engine/whole.py), which asks the mixer for the outbox, and passes
           x, g (None if ``raw``) and the outbox to the ``send`` of the algorithm;
        3. ``send`` (algorithms/gossip.py), which passes them to `Local.adapt`;
        4. `LoopNode._adapt` (optim/node.py), which is the function ``adapt`` of that `Local`;
        5. `local_step_from_optimizers` (optim/inner.py), which copies x to the outbox, binds the
           parameters to the outbox and calls step() of the inner optimizer. The outbox then holds
           the adapted model; x has not changed;
        6. `WholeExchange.receive`, after the message has been sent. The ``receive`` of the
           algorithm replaces x by the average of the messages of this node and its in-neighbours.

        An algorithm that is ahead takes its local step in ``receive``. It has already sent x at the
        end of the previous step, unless there was none, overlap is "never" or the mixer is
        asynchronous. A LOCAL step calls the algorithm's ``local_update``, if it has one, which
        adapts x in place. With fragments, engine/fragments.py replaces engine/whole.py. Finally,
        publish() copies x to the parameters that are not views of it, such as 16-bit parameters.
        """
        self._begin_step()
        lr, skipped = self._take_gradients()
        self.record = self.engine.step(lr, skipped)
        self._node.publish()
        self._end_step()

    def _begin_step(self) -> None:
        """Pass the previous step to the hooks, and move edited parameters to the flat memory.

        :raises JobError: if parameters were changed while they were being sent, or can't be moved
        """
        node = self._node
        clock = self._ready_engine().clock
        if clock.counting:
            clock.lap("compute_s")
        if self._run:
            with clock.uncounted():
                run_directory.open_log(self._run)
                self._run.close_step()
        # If parameters were thawed, this replaces the engine and its clock; the time above belongs
        # to the old one.
        node.check()
        node.edits.end()

    def _take_gradients(self) -> tuple[float, tuple[int, ...]]:
        """Prepare the gradients, and copy them to the flat gradients g if the algorithm reads g.

        An algorithm is ``raw`` if nothing but the inner optimizer reads gradients, which it takes
        from ``.grad``; g is then not used.

        :returns: the learning rate of the first group, and the rows that skip the local step. A
            row is the index of a local node in x and g. A rank of a loop has one node only, so that
            this is (0,) if gradients overflowed, otherwise ()
        """
        node = self._node
        self._stale.check(node.vector.rows[0], self._world.rank)
        skipped = unscaled(self, node.engine, node.vector)
        lr = learning_rate(self._job.algorithm.name, self._inner, self.steps)
        node.gather()
        # The algorithm reads g, so that an overflow would reach the neighbours with its message. If
        # the algorithm is raw, the optimizer is not called, and nothing reads the gradients.
        if skipped and not node.engine.method.raw:
            node.vector.g[0].zero_()
        self._stale.mark_used()
        return lr, skipped

    def _end_step(self) -> None:
        """Keep and log the completed step, and send early if the algorithm is ahead."""
        if self._survival is not None:
            self._survival.keep()
        if self._run:
            self._run.record_step(self.record)
        self.engine.clock.begin()
        self._node.send_early()

    def _ready_engine(self) -> Engine:
        """Return the engine; create it at the first call, and restore a state that was loaded.

        :raises JobError: if this Gossip is closed, or if it is called in a forked process
        """
        if self._node.closed:
            raise JobError(
                "this Gossip is closed, because its world is closed: call it inside the block "
                "`with mpigossip.world() as world:`"
            )
        check_process()
        check_default_device(deadline.this_rank.call or "Gossip")
        if self._loaded is not None:
            with deadline.user_call(LOADED, ordered=self.mixer.synchronous):
                return self._resumed()
        return self._resumed()

    def _resumed(self) -> Engine:
        """Create the flat memory and the engine if there is none; restore a state that was loaded.

        Return the engine. The constructor does not create it, because a program may still move or
        convert its model before the first step.
        """
        first = not self._node.laid_out
        starts = first or self._loaded is not None
        if starts and self.mixer.synchronous:
            states.check_step(self._world, self._loaded)
        if first:
            self._node.lay_out()
            if self._run is not None:
                self._node.watch_frozen()
            self._stale.watch(p for group in self.param_groups for p in group["params"])
        if self._loaded is not None:
            local_layout = self.vector.local_layout
            name = self._job.algorithm.name
            states.check_method(self._world, self._loaded, self.engine, local_layout, name)
            states.check_origin(self._node.world, self._loaded, self.engine, name)
            self._node.restart_exchanges()
            state = self._loaded
            self._loaded = None
            states.restore(state, self.engine, self.vector)
            with torch.no_grad():
                self._node.publish()
        if starts and self._survival is not None:
            self._survival.keep()
        return self.engine

    # -- parts of the optimizer -----------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps so far; after a rank failure, the steps that all survivors have made."""
        return self.engine.index if self._node.laid_out else 0

    def surviving(self) -> AbstractContextManager[None]:
        """Return a context manager for collective calls that the program itself makes.

        With ``survive=True`` and a fault-tolerant MPI, a rank failure inside the block ends the
        block without an error, and the next call of :meth:`step` continues without the failed rank.
        Otherwise, the context manager has no effect.
        """
        return self._node.catch_failure()

    @property
    def engine(self) -> Engine:
        """Engine of this node, available once the first step has begun."""
        return self._node.engine

    @property
    def mixer(self) -> Mixer:
        """Object that exchanges messages between nodes and averages them."""
        return self._node.mixer

    @property
    def vector(self) -> ModuleParameters:
        """Trained parameters in flat memory, available once the first step has begun."""
        return self._node.vector

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict with an additional entry "gossip".

        The entry holds this node's model, the state of the algorithm, and counters; before the
        first step, it is None, or the entry that was loaded. The buffers and the frozen parameters
        of the model are not part of it. The call is not collective, except while a fragment is in
        flight: then all ranks of the node have to make it. Save one state dict for each node, or
        for each rank if ranks have shards, because loading the state dict of another node replaces
        this node's model by the other node's model.

        :raises JobError: inside :meth:`averaged`, or inside :meth:`paused` if the node is
            asynchronous
        """
        self._node.check_not_paused("state_dict()")
        check_default_device("state_dict()")
        self._run_hooks("state_dict_pre")
        entry = self._loaded
        if entry is None and self._node.laid_out:
            self._node.edits.collect(self.vector)
            name = self._job.algorithm.name
            entry = states.state(self.engine, self.vector, self._node.world, name) | {
                "optimizer": optimizer_name(self._inner)
            }
        state = self._inner.state_dict() | {"gossip": entry}
        return self._run_hooks("state_dict_post", state) or state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this node's ``state_dict``, to continue with the next step; call it on all nodes.

        After a result of :meth:`state_dict`, with a synchronous mixer, equal gradients lead to
        steps that are bitwise identical to the steps of the program that saved the state. If the
        state belongs to another node, the next step reports this once, or raises JobError if the
        algorithm needs each node's own state or ranks have shards.

        :param state_dict: result of :meth:`state_dict`, or of the inner optimizer's method of this
            name, which does not contain a model
        :raises JobError: if the entry "gossip" belongs to another model; and in the same cases as
            :meth:`state_dict`
        :raises StoreError: if the state belongs to another inner optimizer
        :raises ValueError: as in torch, if the parameter groups have other sizes
        """
        self._node.check_not_paused("load_state_dict()")
        check_default_device("load_state_dict()")
        state_dict = self._run_hooks("load_state_dict_pre", state_dict) or state_dict
        inner_state = dict(state_dict)
        entry = inner_state.pop("gossip", None)
        # Before the first step, the model may have changed since its layout was planned.
        layouts = self._node.layouts if self._node.laid_out else plan_layouts(self._node.model)
        messages = states.load(inner_state, entry, self._inner, self._node.model, layouts.local)
        if messages and self._world.rank == 0:
            printer.print_line(f"load_state_dict: {'; '.join(messages)}")
        self._loaded = entry
        self._run_hooks("load_state_dict_post")

    def _run_hooks(self, name: str, *arguments: Any) -> Any:
        value = None
        for hook in getattr(self, f"_optimizer_{name}_hooks").values():
            value = hook(self, *arguments) or value
        return value

    # -- all nodes ---------------------------------------------------------------------

    def average(self) -> None:
        """Exchange without a local step, with an asynchronous mixer.

        Call this repeatedly while the program waits, so that the node continues to average with
        other nodes.

        :raises JobError: with fragments, a delay or a blend; while the next exchange is in flight;
            or inside :meth:`averaged` or :meth:`paused`
        """
        self._ready_engine()
        self._node.average()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager for long work of one rank, such as an evaluation on rank 0.

        Synchronous neighbours wait for this rank without a time limit. Asynchronous nodes continue,
        and this node continues to exchange with them in a thread, if MPI allows calls from threads.

        :raises JobError: inside :meth:`averaged`, if a thread would exchange
        """
        return paused(self._node)

    @contextmanager
    def averaged(
        self, twin: nn.Module | None = None, *, recalibrate: Iterable | None = None
    ) -> Iterator[Any]:
        """Return a context manager in which the model is the exact average over all nodes.

        Use it for evaluation, and do not train inside. It is collective: enter it on all ranks,
        even if only one of them evaluates. Parameters and floating-point buffers are averaged,
        including the statistics of BatchNorm, and are restored when the block ends. If a rank fails
        while the average is computed, and the others survive, the model keeps its own values.

        :param twin: module that is averaged and returned in place of the model, such as its EMA;
            None: the model
        :param recalibrate: batches of this node with which the statistics of BatchNorm are computed
            again for the averaged model, before they are averaged themselves: tensors, pairs
            (inputs, targets), mappings whose entries are passed by name if ``forward`` has
            parameters of these names, or objects with a method ``to(device)``, such as graphs;
            None: average the present statistics
        :raises JobError: inside another averaged() or an asynchronous pause; if ``recalibrate`` is
            given and the module has no BatchNorm with running statistics; on all ranks, if the
            batches of a rank are empty, or if the modules of the ranks differ in layout
        """
        self._ready_engine()
        other = None if twin is None or twin is self._given else arguments.one_module(twin, "twin")
        with averaged(self._node, other, recalibrate):
            yield self._given if other is None else twin

    def consensus_distance(self) -> float:
        """Return the consensus distance (1/n) Σ_i ‖x_i − x̄‖² / ‖x̄‖²; collective.

        The result is NaN if a rank fails during the call and the others survive.

        :raises JobError: inside :meth:`averaged`, or inside :meth:`paused` if the node is
            asynchronous
        """
        self._ready_engine()
        return distance(self._node)

    # -- the run directory -----------------------------------------------------------------------

    def log(self, *step_and_metrics: int | Mapping[str, Any], **figures: Any) -> None:
        """Add metrics of this node's step to the log, until the next step or :meth:`save` ends it.

        :param step_and_metrics: number of the step, counted from 0, and dicts of metrics; without a
            number, the metrics belong to the last step, or to the next step if there is none yet
        :param figures: numbers or tensors of one number by name, each a column of the log; "loss",
            "lr" and "gradient_norm" have the meaning that they have in a job, and "samples" of the
            step yield the speed
        :raises JobError: if there is no run directory; if the step has been written, or is later
            than the next one; or if a name is invalid or the log measures the metric itself
        """
        run = self._required_run("log")
        step: int | None = None
        for value in step_and_metrics:
            if isinstance(value, Mapping):
                figures = {**value, **figures}
            elif step is None:
                step = value
        run_directory.add_metrics(run, step, figures)

    def keep(self, **things: Any) -> None:
        """Add objects to checkpoints; call it before :meth:`resume`.

        :param things: objects by name, either with ``state_dict`` and ``load_state_dict``, or torch
            generators (``get_state`` and ``set_state``)
        :raises JobError: if there is no run directory, if a name is invalid, or if an object has
            neither pair of methods
        """
        self._required_run("keep")
        run_directory.check_kept(things)
        self._node.keeps |= things

    def save(self) -> None:
        """Write a checkpoint of the current step in the background; collective.

        :raises JobError: if there is no run directory, or if it has a checkpoint from which the
            program has not resumed; inside :meth:`averaged`, or inside :meth:`paused` if the node
            is asynchronous
        """
        run = self._required_run("save")
        self._ready_engine()
        run_directory.save(run, self._node)

    def resume(self) -> int:
        """Continue from the newest checkpoint, and return the number of steps made; collective.

        If there is no checkpoint, the result is 0, and nothing changes. If the number of nodes, the
        ranks per node, the algorithm and the cadence are as in the checkpoint, and the mixer is
        synchronous, the following is restored bitwise identically: model, optimizer, algorithm,
        torch's random numbers, frozen parameters that the program has changed since the first step,
        and the objects given to :meth:`keep`. Otherwise, messages report what is dropped or reset.
        If the number of nodes differs, all nodes start from the exact average. If the checkpoint is
        at the last of ``steps``, a message reports that nothing is left to train.

        :raises JobError: if there is no run directory, or if :meth:`step` or :meth:`save` has been
            called before
        :raises UserError: if the checkpoint is damaged or belongs to another model or optimizer
        """
        run = self._required_run("resume")
        self._ready_engine()
        if run.begun:
            raise JobError("call resume() before the first step, and before save()")
        if run.newest is not None:
            self._node.restart_exchanges()
        step = run.resume()
        if self._survival is not None:
            self._survival.keep(reset=True)
        total = self._job.run.steps
        if total and step >= total and self._node.world.rank == 0:
            printer.print_line(
                f"{self._job.run.folder}: this loop has already made its {total:,} steps; to train "
                "longer, increase steps; to train again, name another run directory"
            )
        return step

    @property
    def stopping(self) -> bool:
        """True once all ranks have agreed, at the same step, to stop: call :meth:`exit` then.

        The reason is SIGTERM, SIGUSR1, SIGUSR2, ``touch RUN/STOP``, the end of the allocation, or a
        hook. Without a run directory, reading this raises JobError.
        """
        return self._required_run("stopping").stopping

    def handle_signals(self) -> None:
        """Install the signal handlers again, after other code has replaced them.

        :raises JobError: if there is no run directory
        """
        self._required_run("handle_signals").stopper.listen()

    def exit(self) -> NoReturn:
        """Save a checkpoint and exit with code 75, on which a batch script requeues; collective.

        :raises SystemExit: always, unless an error is raised before
        :raises JobError: if there is no run directory; inside :meth:`averaged`, or inside
            :meth:`paused` if the node is asynchronous
        """
        run = self._required_run("exit")
        self._node.check_not_paused("exit()")
        run.stopped = True
        self._world.close()
        raise SystemExit(STOPPED)

    def exit_if_stopping(self, save: Callable[..., object] | None = None, *arguments: Any) -> None:
        """If :attr:`stopping`, call ``save(*arguments)``, unless it is None, and :meth:`exit`.

        :param save: function that saves the state of the program; None: nothing to save
        :param arguments: arguments of ``save``
        :raises JobError: if there is no run directory
        """
        if self.stopping:
            if save is not None:
                save(*arguments)
            self.exit()

    @staticmethod
    def callback(framework: ModuleType) -> Any:
        """Return a callback for a trainer that saves, stops and exits if :attr:`stopping`.

        :param framework: the module ``transformers``, whose trainer stops after the step, or
            ``lightning`` or ``pytorch_lightning``, whose trainer stops after the epoch
        :raises JobError: for other frameworks
        """
        return make_callback(framework)

    def _required_run(self, call: str) -> Run:
        """Return the run.

        :param call: name of the method that needs the run, for the message
        :raises JobError: if this Gossip was created without ``run``
        """
        if self._run is None:
            raise JobError(f'{call}: needs a run directory: pass Gossip(…, run="runs/mine")')
        return self._run

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the run, then free windows and threads; collective.

        If there is a run directory, this saves the last step, and writes the end of the log and the
        summary, unless an exception ends the program. Asynchronous nodes and nodes with ``survive``
        wait here until all nodes have left their loops. The world calls this when it closes.
        """
        check_process()
        # Asynchronous nodes and survivors take part in exchanges of others until all nodes end.
        alone = self.mixer.synchronous and not self._world.survives
        status = deadline.CLOSING if alone else deadline.WAITING
        # The default device of the program may be "meta": don't use it for what is written at the
        # end.
        with torch.device("cpu"), torch.no_grad(), deadline.announce_end(self.steps, status):
            self._end()
        self._stale.release()
        self._open.clear()

    def _end(self) -> None:
        run = self._run
        with closing(self._node, self._world):
            # The program may call exit() while it handles another exception.
            if run is not None and sys.exception() is not None and not run.stopped:
                run.abandon()
            if self._survival is not None:
                self._survival.leave()
            elif run is not None:
                run.finish()


def _close(optimizers: list[Gossip]) -> None:
    for optimizer in [*optimizers]:
        optimizer.close()
