"""Decentralized training in a user's own loop: a torch optimizer whose step exchanges too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from mpigossip.algorithms import takes_local
from mpigossip.cluster.world import World
from mpigossip.config import JobError
from mpigossip.doors import equal_start
from mpigossip.doors.inner import borrowed, check, check_plain_sgd, decay, rate
from mpigossip.doors.settings import DIVIDES, settings
from mpigossip.doors.stale import Stale
from mpigossip.doors.wrapper import Wrapper
from mpigossip.engine.consensus import consensus_distance
from mpigossip.engine.module import LOW, Parameters
from mpigossip.engine.state import joined, split
from mpigossip.engine.step import Engine, Record
from mpigossip.engine.vector import flatten
from mpigossip.groups.base import Single
from mpigossip.groups.devices import make_group
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import Layout, Mixer
from mpigossip.runs.run import meet
from mpigossip.training import assemble

T = TypeVar("T")


class Gossip(Wrapper):
    """A `torch.optim` optimizer around another one: its step, and the exchange with other nodes.

    Each rank is a node::

        with mpigossip.world() as world:
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
            optimizer = mpigossip.Gossip(world, model, optimizer, algorithm="dsgd")
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()

    Schedulers, `torch.amp.GradScaler`, clipping and frameworks see ``param_groups``, ``state`` and
    ``defaults`` of the inner optimizer. A node whose gradients overflowed takes no step of its
    own and joins the round. Everything that a job refuses is refused here by the same words.
    Beyond that, because of this door:

    * LBFGS: it calls its closure several times a step, each a gradient of its own;
    * methods with a momentum of their own (dmsgd, qg-dmsgd, decentlam, detag, defacto) with
      anything but plain SGD, or with several learning rates: they take rate and coupled weight
      decay from it, and never its step;
    * slowmo with several learning rates: it divides by the one; and a rate of 0 with slowmo,
      qg-dmsgd and decentlam;
    * cadence "gossip-aga", which measures the loss; "adpsgd" without ``total``, the run's steps;
    * local steps by name (``local``, "accumadam"): the optimizer is the local step;
    * ``add_param_group`` after the first step: the vector is laid out;
    * layers sent during backward: clipping or a scaler may still change their gradients.

    parallel, dsgt and momentum-tracking give every parameter a gradient, zero where a node had
    none; all others leave parameters without a gradient to the optimizer, which skips them.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        algorithm: str = "dsgd",
        graph: Any = None,
        cadence: str | None = None,
        wire: str | None = None,
        overlap: Literal["auto", "never"] = "auto",
        mixer: str = "synchronous",
        *,
        devices: tuple[str, ...] | None = None,
        measure_every: int = 0,
        **options: Any,
    ):
        """Collective: all nodes begin with the exact average of their models.

        Names are those of a job, None its default; ``graph`` may be a networkx graph. ``options``:
        of the algorithm, graph and cadence, and ``seed``, ``weights``, ``lazy``, ``levels``,
        ``kept``, ``same_host``, ``timeout_s``. ``overlap = "never"``: an exchange that could
        travel during forward and backward begins with the step. ``devices``: slots of this node,
        one a device, see :meth:`run`; None: where the model is. ``measure_every``: steps between
        two consensus distances in :attr:`record`.
        """
        super().__init__(optimizer)
        self._world, self._model = world, model
        if overlap not in ("auto", "never"):
            raise JobError(
                [f'overlap = "{overlap}": choose "auto" (methods that are ahead travel during '
                 'forward and backward) or "never"; layer by layer during backward is a job\'s '
                 "(node.overlap), since clipping or a scaler may still change a loop's gradients"]
            )  # fmt: skip
        self._ahead, self._every = overlap == "auto", measure_every
        where = str(next(model.parameters()).device)
        with world.together(JobError, ValueError):
            check(model, optimizer)
            self._job, self._graph = settings(
                world, where, algorithm, graph, cadence, wire, mixer, options
            )
            if not takes_local(algorithm):
                check_plain_sgd(algorithm, optimizer)
        self._devices = devices or (where,)
        threads, limit = torch.get_num_threads(), self._job.node.timeout_s
        self._slots = make_group(self._devices, threads, True, limit) if devices else None
        self._engine: Engine | None = None
        self._loaded: dict | None = None
        self._kept: list[int] = []
        self._stale = Stale()
        self.record: Record | None = None
        """what the last step showed"""
        self._mixer = self._open(where)
        equal_start.begin(world, self._mixer, model)
        self.models = [model, *(copy.deepcopy(model).to(d) for d in self._devices[1:])]
        world.resources.callback(self.close)

    # -- a torch optimizer ----------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"Gossip[{self._job.algorithm.name}, {self._graph.name}] {self._inner!r}"

    def add_param_group(self, group: dict[str, Any]) -> None:
        """To the inner optimizer, before the first step."""
        if self._engine is not None:
            raise JobError(
                ["add_param_group: the vector that nodes exchange is laid out at the first step; "
                 "add groups before it"]
            )  # fmt: skip
        self._inner.add_param_group(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The local step, and the exchange that the cadence asks for; waits for the neighbours.

        ``closure`` is evaluated once; its value is returned.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        with torch.no_grad():
            self._step()
        return value

    def _step(self) -> None:
        engine = self._laid_out()
        self.vector.check()
        self._check_untouched()
        self._stale.check()
        self._average_slots()
        skipped = self._unscale()
        lr = self._rate()
        if not engine.method.raw:
            self.vector.gather()
            if skipped:
                self.vector.g[0].zero_()
            elif not takes_local(self._job.algorithm.name):
                decay(self.vector, self._inner)
        self._stale.spent()
        self.record = engine.step(lr, skipped)
        self._publish()
        if self._ahead and engine.method.ahead and self.mixer.synchronous:
            engine.ahead()
            self._kept = self.vector.versions()

    def _rate(self) -> float:
        """The learning rate, where the method has one."""
        name = self._job.algorithm.name
        lr, one = rate(self._inner)
        if not one and (name in DIVIDES or not takes_local(name)):
            raise JobError(
                [f'algorithm.name = "{name}" has one learning rate for all parameters; the '
                 "optimizer's groups have several: give them the same"]
            )  # fmt: skip
        if lr == 0 and name in DIVIDES:
            raise JobError(
                [f'algorithm.name = "{name}" divides by the learning rate, which is 0 at step '
                 f"{self.engine.index}: begin the warm-up above it"]
            )  # fmt: skip
        return lr

    def _unscale(self) -> tuple[int, ...]:
        """Take GradScaler's scale out of the gradients; (0,) where they overflowed."""
        found = getattr(self, "found_inf", None)
        if found is None:
            return ()
        wrong = torch.as_tensor(float(found) > 0, dtype=torch.float64).reshape(1, 1)
        if self.engine.method.always_global:  # used by all or by none
            wrong = self.mixer.mean_scalars(wrong)
        if float(wrong.reshape(-1)[0]) > 0:
            return (0,)
        self.unscale(self.vector.rows[0])
        return ()

    # -- where everything lies ------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """What makes the steps, once the first has begun."""
        assert self._engine is not None, "before the first step()"
        return self._engine

    @property
    def mixer(self) -> Mixer:
        """What lies between the nodes."""
        return self._mixer

    def _open(self, device: str) -> Mixer:
        """The mixer for the model as it is; collective."""
        self._flat = flatten(self._model, types=(torch.float32, *LOW))
        method = assemble.make_method(self._job, 0, self._graph, equal_start.SIGNATURE)
        wire, widths = assemble.make_wire(self._job), self._flat.widths
        layout = Layout(widths, method.vectors, method.scalars, (device,), wire)
        node, self._where = self._job.node, device
        alone = self._world.comm is None  # nobody whose pace could differ
        return open_mixer(
            self._graph, layout, self._world, "synchronous" if alone else node.mixer,
            same_host=node.same_host, gpu_window=node.gpu_window, timeout_s=node.timeout_s,
        )  # fmt: skip

    def _reopen(self, device: str) -> None:
        self._mixer.close()
        self._mixer = self._open(device)

    def _laid_out(self) -> Engine:
        """The engine over the vector, which is laid out where the model is by the first step."""
        if self._engine is None:
            device = str(next(self._model.parameters()).device)
            planned = self._flat
            if device != self._where or planned != flatten(
                self._model, types=(torch.float32, *LOW)
            ):
                self._reopen(device)
            self.vector = Parameters([self._model])
            local = borrowed(self.vector, [self._inner])
            method = assemble.make_method(self._job, 0, self._graph, local)
            cadence = assemble.make_cadence(self._job, method, self._graph)
            group = Single(device)
            self._engine = Engine(
                self._mixer, group, self.vector, [method], cadence, measure_every=self._every
            )
            self._stale.watch(self.vector.rows[0])
        if self._loaded is not None:
            self._restore(self._loaded)
        return self._engine

    def _publish(self) -> None:
        """What the parameters' other holders are to see: 16-bit ones, and the other slots."""
        self.vector.publish()
        for model in self.models[1:]:
            for own, new in zip(model.parameters(), self._model.parameters(), strict=True):
                own.copy_(new)
            model.zero_grad()

    def _check_untouched(self) -> None:
        """What travels already must be what the parameters still are."""
        if self._kept and self._kept != self.vector.versions():
            raise JobError(
                ["parameters were changed between steps while they were on their way to the "
                 'neighbours; give Gossip overlap="never", or leave them alone']
            )  # fmt: skip
        self._kept = []

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and as "gossip" this node's model, method and counters.

        Not collective. Exact, with a file a node: another node's would put this one at its place.
        """
        self._run_hooks("state_dict_pre")
        state = self._inner.state_dict() | {"gossip": self._loaded or self._state()}
        return self._run_hooks("state_dict_post", state) or state

    def _state(self) -> dict[str, Any] | None:
        if self._engine is None:
            return None
        engine, flat = self._engine, self.vector.flat
        return {
            "names": list(flat.names),
            "model": torch.from_numpy(joined(self.vector.x, 0, flat)),
            "arrays": {name: torch.from_numpy(a) for name, a in engine.arrays().items()},
            "numbers": engine.numbers() | {"bytes_sent": self._mixer.bytes_sent[0]},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` stood, to the bit, at the next step; on all nodes."""
        state_dict = self._run_hooks("load_state_dict_pre", state_dict) or state_dict
        given = dict(state_dict)
        mine = given.pop("gossip", None)
        if mine is not None and tuple(mine["names"]) != self._flat.names:
            raise JobError(
                ["load_state_dict: the state is of a model with other parameters: "
                 f"{', '.join(mine['names'][:3])} …"]
            )  # fmt: skip
        low = [(p, p.data) for p in self._model.parameters() if p.dtype in LOW]
        for p, data in low:  # torch casts state to the parameter's type, and masters are float32
            p.data = data.float()
        self._inner.load_state_dict(given)
        for p, data in low:
            p.data = data
        self._loaded = mine
        if mine is not None:
            equal_start.place(self._model, self._flat, mine["model"])
        self._run_hooks("load_state_dict_post")

    def _restore(self, saved: dict[str, Any]) -> None:
        """Put vector, method and clock where they stood; exchanges begin anew, on all nodes."""
        self._loaded, engine = None, self.engine
        if engine.index or self._kept:  # the mixer's rounds are consecutive
            self._reopen(self._where)
            engine.adopt(self._mixer)
            self._kept = []
        split(saved["model"].numpy(), self.vector.x, 0, self.vector.flat)
        numbers = saved["numbers"]
        engine.restore({name: a.numpy() for name, a in saved["arrays"].items()}, numbers)
        self._mixer.bytes_sent[0] = int(numbers["bytes_sent"])
        with torch.no_grad():
            self._publish()

    # -- looking at all nodes; several slots ------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For backward passes whose gradients only add up; here they never exchange anything."""
        yield

    def average(self) -> None:
        """An exchange without a step, while others are waited for (asynchronous mixers)."""
        self.vector.gather()
        self.engine.average(rate(self._inner)[0])
        self._publish()

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model as the exact average over nodes, for evaluation; taken back afterwards.

        Collective. Norm buffers stay those of this node.
        """
        engine, (x,) = self._laid_out(), self.vector.x
        with torch.no_grad():
            meet(self, self._world)
            engine.settle()
            own = x.clone()
            x.copy_(self.mixer.mean(x))
            self._publish()
        try:
            yield self._model
        finally:
            with torch.no_grad():
                x.copy_(own)
                self._publish()

    def consensus_distance(self) -> float:
        """(1/n) Σ_i ‖x_i − x̄‖² / ‖x̄‖²; collective."""
        engine = self._laid_out()
        with torch.no_grad():
            meet(self, self._world)
            engine.settle()
            return consensus_distance(self.vector.x[0], self.mixer)

    def run(self, work: Callable[[int, nn.Module], T]) -> list[T]:
        """``work(slot, replica)`` on every slot at once: forward and backward of its batch."""
        if self._slots is None:
            return [work(0, self._model)]
        return self._slots.run(lambda slot: work(slot, self.models[slot]))

    def _average_slots(self) -> None:
        """Mean over slots into the gradients of slot 0, summed in slot order."""
        others = [dict(m.named_parameters()) for m in self.models[1:]]
        for name, parameter in self._model.named_parameters() if others else ():
            for grad in (replica[name].grad for replica in others):
                if grad is not None and parameter.grad is not None:
                    parameter.grad.add_(grad.to(parameter.device))
            if parameter.grad is not None:
                parameter.grad.div_(len(self.models))

    def close(self) -> None:
        """Free windows and threads; collective, and done by the world where it ends."""
        self._mixer.close()
        if self._slots is not None:
            self._slots.close()
