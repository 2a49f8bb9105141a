"""Going on from a checkpoint: exactly, or elastically with other nodes, slots or method.

And from what nodes keep in memory, where others were lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpigossip.cluster.world import World
from mpigossip.engine.state import of_rows, split
from mpigossip.engine.step import Engine
from mpigossip.engine.vector import Flat
from mpigossip.groups.base import Group, held
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.average import is_floating, over_nodes, over_slots
from mpigossip.store.checkpoint import Manifest, NodeState, Number
from mpigossip.store.hdf5 import reading
from mpigossip.store.manifest import MOST
from mpigossip.training.loop import Trainer
from mpigossip.training.snapshot import restore

COUNTERS = {"index", "born", "round", "shift", "seconds", "bytes_sent"}
AVERAGED = {"momentum", "first", "second"}
"""State that is a mean of gradients: its average over nodes is the state of the averaged model."""


def go_on(
    trainer: Trainer, path: Path, steps_per_epoch: int
) -> tuple[dict[str, Number], list[str]]:
    """Put the trainer's shards to where the checkpoint stands; its numbers, and what to tell.

    No rank meets another here; :func:`share` follows.

    Equal nodes, slots and state: exact to the bit. Otherwise every node begins with the exact
    average of the models, at the same part of its epoch; state that is a mean of gradients is
    averaged likewise, other state begins anew. Raises StoreError where the model is another one.
    """
    manifest = checkpoint.read_manifest(path)
    _check_facts(manifest, path)
    slots = int(manifest.meta["slots"])
    fits = (manifest.n, slots) == (trainer.mixer.n, trainer.group.slots)
    first = checkpoint.read_node(path, trainer.mixer.rows[0] if fits else 0)
    same_model(first, trainer.replicas.flat, path, "the [model] that was saved")
    check_counters(first, path)
    numbers = first.numbers
    trainer.engine.count_from(numbers)
    shift(trainer, numbers, int(manifest.meta["steps_per_epoch"]), steps_per_epoch)
    if fits and same_method(first, trainer.engine):
        _exactly(trainer, path, first)
        told = []
    else:
        told = [f"from the exact average of {manifest.n} nodes x {slots} slots"]
        replicas, rows = trainer.replicas, range(len(trainer.mixer.rows))
        buffers, mean = [replicas.buffers(row) for row in rows], over_nodes(path, manifest.n)
        told += begin_at(trainer.engine, buffers, mean, numbers)
    return numbers, told


def share(trainer: Trainer) -> None:
    """What :func:`go_on` has put into the shards, into all slots; collective over the node."""
    trainer.group.all_gather(trainer.replicas.x, trainer.replicas.full)


class Kept:
    """This rank after each of its last two whole steps: what survivors of a loss go on from."""

    def __init__(self) -> None:
        """Nothing kept yet."""
        self.states: deque[NodeState] = deque(maxlen=2)
        self.whole_at = time.perf_counter()
        """when the last of the steps was done"""

    def keep(self, snapshot: Callable[[NodeState | None], NodeState]) -> None:
        """A step is whole: keep ``snapshot(spare)``, made in the memory of the oldest."""
        full = len(self.states) == self.states.maxlen
        self.states.append(snapshot(self.states.popleft() if full else None))
        self.whole_at = time.perf_counter()

    def agree(self, world: World, *beside: Any) -> tuple[NodeState, tuple]:
        """The state that this rank goes on from, and (the counters that all do, *beside).

        Those of the rank that has done the fewest steps: one that saw the loss of another later
        may be ahead, and further ahead than what is kept it goes on with its oldest. Collective.
        """
        stands = world.gather((self.states[-1].numbers, *beside))
        agreed = world.broadcast(stands and min(stands, key=lambda one: one[0]["index"]))
        index = agreed[0]["index"]
        found = (one for one in self.states if one.numbers["index"] == index)
        return next(found, self.states[0]), agreed


def go_on_together(
    engine: Engine,
    buffers: Sequence[Mapping[str, torch.Tensor]],
    mine: NodeState,
    numbers: Mapping[str, Number],
) -> list[str]:
    """Like :func:`go_on`, from what each node kept of the step at hand; what to tell. Collective.

    ``mine``: this rank's; ``numbers``: the counters that all go on from; ``buffers``: one a slot.
    """
    engine.count_from(numbers)
    mean: dict[str, Any] = {}
    for name, array in over_slots(mine).items():
        mean[name] = array
        if is_floating(array):
            row = torch.from_numpy(array.astype(np.float64).reshape(1, -1))
            mean[name] = engine.mixer.mean(row).numpy().reshape(array.shape)
    mean["bytes_sent"] = mine.numbers["bytes_sent"]
    counted = mine.numbers.get("local_steps", engine.index - engine.born)
    mean["local_steps"] = engine.mixer.mean_scalars(torch.tensor([[float(counted)]]).double())
    told = begin_at(engine, [buffers], mean, numbers)
    engine.group.all_gather(engine.vector.x, engine.vector.full)
    return told


def shift(trainer: Trainer, numbers: Mapping[str, Number], before: int, now: int) -> None:
    """Let the epoch go on where it was, in the number of steps that it has now."""
    trainer.shift = int(numbers["shift"])
    if before != now:
        done = (trainer.index - trainer.shift) / before
        trainer.shift = trainer.index - round(done * now)


def _check_facts(manifest: Manifest, path: Path) -> None:
    """StoreError unless the facts that a run leaves are there: the checkpoint may be another's."""
    for name in ("steps_per_epoch", "slots"):
        value = manifest.meta.get(name)
        if not isinstance(value, int) or not 0 < value < MOST:
            raise StoreError(
                f"{path}: {name} = {str(value)[:40]}, must be 1 or more; use another checkpoint"
            )


def check_counters(saved: NodeState, path: Path, more: Collection[str] = ()) -> None:
    """StoreError where it lacks a number that a run leaves, or one of ``more``."""
    if lacking := COUNTERS.union(more) - saved.numbers.keys():
        raise StoreError(
            f"{path} lacks {', '.join(sorted(lacking))}, which a run saves; use another checkpoint"
        )


def same_model(saved: NodeState, flat: Flat, path: Path, model: str) -> None:
    """StoreError unless the parameters are those of ``flat``; ``model``: which to resume with."""
    was = dict(zip(saved.names, saved.shapes, strict=True))
    now = dict(zip(flat.names, flat.shapes, strict=True))
    if was != now or saved.names != flat.names:
        differing = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        example = f", as {differing[0]} shows" if differing else " in another order"
        raise StoreError(
            f"{path} holds another model{example}: resume with {model} "
            "(`mpigossip checkpoint show` prints its job)"
        )


def same_method(saved: NodeState, engine: Engine) -> bool:
    """Whether the method and its cadence have the state that was saved."""
    was, parts = {name for name in saved.arrays if name.startswith("state/")}, engine.parts()
    figures = {name: part.shape[1] for name, (part, *_) in parts.items() if of_rows(part)}
    return (
        was == set(parts)
        and all(saved.arrays[name].size == size for name, size in figures.items())
        and _same_rhythm(saved.numbers, engine)
    )


def _same_rhythm(numbers: Mapping[str, Number], engine: Engine) -> bool:
    """Whether the cadence has the state that was saved."""
    was = {name for name in numbers if name.startswith("cadence/")}
    return was == {f"cadence/{name}" for name in engine.rhythm._fields}


def _exactly(trainer: Trainer, path: Path, first: NodeState) -> None:
    for row, node in enumerate(trainer.mixer.rows):
        saved = first if row == 0 else checkpoint.read_node(path, node)
        check_counters(saved, path)
        with reading(path):  # arrays of other shapes than the model's
            restore(trainer.engine, trainer.replicas.buffers(row), row, saved)
        trainer.mixer.bytes_sent[row] = _sent(trainer.group, saved.numbers["bytes_sent"])
        trainer.settings.precision.restore(row, saved.numbers)


def begin_at(
    engine: Engine,
    buffers: Sequence[Sequence[Mapping[str, torch.Tensor]]],
    mean: Mapping[str, Any],
    numbers: Mapping[str, Number],
) -> list[str]:
    """Every node at the average, with the state that has a mean; the graph's clock from 0.

    ``buffers``: of each node here, slot by slot. ``numbers``: those saved, with the cadence's
    state, which goes on where the method's does.
    """
    told: list[str] = []
    state, x, flat = engine.parts(), engine.vector.x, engine.vector.flat
    names = [name.removeprefix("state/") for name in state]
    kept = all(name.split("/")[-1] in AVERAGED and name in mean for name in state)
    here = held(engine.group)
    for row, of_slots in enumerate(buffers):
        split(mean["parameters"], x, row, flat, here)
        for of_slot in of_slots:
            _set_buffers(of_slot, mean)
        if kept:
            for name, parts in state.items():
                split(mean[name], parts, row, flat, here)
    dropped = [n.removeprefix("state/") for n in mean if n.startswith("state/") and not kept]
    if "local_steps" in mean:
        engine.counts = [round(float(mean["local_steps"]))] * len(buffers)
    if kept and names:
        told.append(f"averaged: {', '.join(names)}")
    if not kept:
        engine.restart()
        told.append(f"dropped: {', '.join(dropped) or 'nothing'}, begun anew: {', '.join(names)}")
    elif engine.born < engine.index and _same_rhythm(numbers, engine):
        engine.restore_rhythm(numbers)
    engine.round = 0
    engine.mixer.bytes_sent[:] = [_sent(engine.group, mean["bytes_sent"])] * len(buffers)
    return told


def _sent(group: Group, sent: Any) -> int:
    """What a process counts of a node's bytes: all of them in its first."""
    return int(sent) if 0 in group.mine else 0


def _set_buffers(buffers: Mapping[str, torch.Tensor], mean: Mapping[str, Any]) -> None:
    """Norm buffers: the average over nodes and slots; counters as slot 0 of node 0 had them."""
    for name, buffer in buffers.items():
        buffer.copy_(torch.as_tensor(np.array(mean[f"buffers/{name}"])).view(buffer.shape))
