"""Going on from a checkpoint: exactly, or elastically with other nodes, slots or method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpigossip.engine.state import split
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.average import is_floating, over_nodes, over_slots
from mpigossip.store.checkpoint import Manifest, NodeState, Number
from mpigossip.store.hdf5 import reading
from mpigossip.store.manifest import MOST
from mpigossip.training.loop import Trainer
from mpigossip.training.replicas import Replicas
from mpigossip.training.snapshot import restore

COUNTERS = {"index", "born", "round", "shift", "seconds", "bytes_sent"}
AVERAGED = {"momentum", "first", "second"}
"""State that is a mean of gradients: its average over nodes is the state of the averaged model."""


def go_on(
    trainer: Trainer, path: Path, steps_per_epoch: int
) -> tuple[dict[str, Number], list[str]]:
    """Put the trainer to where the checkpoint stands; its numbers, and what to tell.

    Equal nodes, slots and state: exact to the bit. Otherwise every node begins with the exact
    average of the models, at the same part of its epoch; state that is a mean of gradients is
    averaged likewise, other state begins anew. Raises StoreError where the model is another one.
    """
    manifest = checkpoint.read_manifest(path)
    _check_facts(manifest, path)
    first = checkpoint.read_node(path, trainer.mixer.rows[0] if _fits(manifest, trainer) else 0)
    _same_model(first, trainer.replicas, path)
    _check_counters(first, path)
    numbers = first.numbers
    _set_counters(trainer, numbers)
    _shift(trainer, int(manifest.meta["steps_per_epoch"]), steps_per_epoch)
    if _fits(manifest, trainer) and _same_state(first, trainer) and _same_rhythm(first, trainer):
        _exactly(trainer, path, first)
        told = []
    else:
        slots = int(manifest.meta["slots"])
        told = [f"from the exact average of {manifest.n} nodes x {slots} slots"]
        told += _begin_at(trainer, over_nodes(path, manifest.n))
        if trainer.engine.born < trainer.index and _same_rhythm(first, trainer):
            trainer.engine.restore_rhythm(numbers)
    trainer.group.all_gather(trainer.replicas.x, trainer.replicas.full)
    return numbers, told


def go_on_together(
    trainer: Trainer, mine: NodeState, numbers: Mapping[str, Number], before: int, now: int
) -> list[str]:
    """The same in memory, from what each node kept of the step at hand; what to tell. Collective.

    ``mine``: this rank's; ``numbers``: the counters that all go on from; ``before`` and ``now``:
    steps of an epoch then and with the present nodes.
    """
    _set_counters(trainer, numbers)
    _shift(trainer, before, now)
    mean: dict[str, Any] = {}
    for name, array in over_slots(mine).items():
        mean[name] = array
        if is_floating(array):
            row = torch.from_numpy(array.astype(np.float64).reshape(1, -1))
            mean[name] = trainer.mixer.mean(row).numpy().reshape(array.shape)
    mean["bytes_sent"] = mine.numbers["bytes_sent"]
    told = _begin_at(trainer, mean)
    if trainer.engine.born < trainer.index:
        trainer.engine.restore_rhythm(numbers)
    trainer.group.all_gather(trainer.replicas.x, trainer.replicas.full)
    return told


def _set_counters(trainer: Trainer, numbers: Mapping[str, Number]) -> None:
    trainer.engine.count_from(numbers)
    trainer.shift = int(numbers["shift"])


def _shift(trainer: Trainer, before: int, now: int) -> None:
    """Let the epoch go on where it was, in the number of steps that it has now."""
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


def _check_counters(saved: NodeState, path: Path) -> None:
    lacking = COUNTERS - saved.numbers.keys()
    if lacking:
        raise StoreError(
            f"{path} lacks {', '.join(sorted(lacking))}, which a run saves; use another checkpoint"
        )


def _fits(manifest: Manifest, trainer: Trainer) -> bool:
    return manifest.n == trainer.mixer.n and manifest.meta["slots"] == trainer.group.slots


def _same_model(saved: NodeState, replicas: Replicas, path: Path) -> None:
    flat = replicas.flat
    was = dict(zip(saved.names, saved.shapes, strict=True))
    now = dict(zip(flat.names, flat.shapes, strict=True))
    if was != now or saved.names != flat.names:
        differing = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        example = f", as {differing[0]} shows" if differing else " in another order"
        raise StoreError(
            f"{path} holds another model{example}: resume with the [model] that was saved "
            "(`mpigossip checkpoint show` prints its job)"
        )


def _same_state(saved: NodeState, trainer: Trainer) -> bool:
    was = {name for name in saved.arrays if name.startswith("state/")}
    return was == set(trainer.engine.parts())


def _same_rhythm(saved: NodeState, trainer: Trainer) -> bool:
    was = {name for name in saved.numbers if name.startswith("cadence/")}
    return was == {f"cadence/{name}" for name in trainer.engine.rhythm._fields}


def _exactly(trainer: Trainer, path: Path, first: NodeState) -> None:
    for row, node in enumerate(trainer.mixer.rows):
        saved = first if row == 0 else checkpoint.read_node(path, node)
        _check_counters(saved, path)
        with reading(path):  # arrays of other shapes than the model's
            restore(trainer.replicas, trainer.engine, row, saved)
        trainer.mixer.bytes_sent[row] = int(saved.numbers["bytes_sent"])
        trainer.settings.precision.restore(row, saved.numbers)


def _begin_at(trainer: Trainer, mean: Mapping[str, Any]) -> list[str]:
    """Every node at the average, with the state that has a mean; the graph's clock from 0."""
    told: list[str] = []
    engine, state = trainer.engine, trainer.engine.parts()
    names = [name.removeprefix("state/") for name in state]
    kept = all(name.split("/")[-1] in AVERAGED and name in mean for name in state)
    for row in range(len(trainer.mixer.rows)):
        split(mean["parameters"], trainer.replicas.x, row, trainer.replicas.flat)
        _set_buffers(trainer.replicas, row, mean)
        if kept:
            for name, parts in state.items():
                split(mean[name], parts, row, trainer.replicas.flat)
    dropped = [n.removeprefix("state/") for n in mean if n.startswith("state/") and not kept]
    if kept and names:
        told.append(f"averaged: {', '.join(names)}")
    if not kept:
        engine.restart()
        told.append(f"dropped: {', '.join(dropped) or 'nothing'}, begun anew: {', '.join(names)}")
    engine.round = 0
    trainer.mixer.bytes_sent[:] = [int(mean["bytes_sent"])] * len(trainer.mixer.rows)
    return told


def _set_buffers(replicas: Replicas, row: int, mean: Mapping[str, Any]) -> None:
    """Norm buffers: the average over nodes and slots; counters as slot 0 of node 0 had them."""
    for buffers in replicas.buffers(row):
        for name, buffer in buffers.items():
            buffer.copy_(torch.as_tensor(np.array(mean[f"buffers/{name}"])).view(buffer.shape))
