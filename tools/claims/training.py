"""Runs for the training claims: LeNet on CIFAR-10, all nodes of a run simulated in one process.

A claim's protocol is a file `jobs/claims/NAME.toml`: nodes, epochs, seeds, the grid of learning
rates, the job, and what differs between cases (data) and methods. Rates are searched for with one
seed on a validation set of training images that are not trained on (`search.jsonl`); what is
reported comes from other seeds and test images (`runs.jsonl`). Each finished run is a line of its
file, and is not done again; runs that don't need each other are done side by side.
"""

from __future__ import annotations

import copy
import json
import math
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from mpigossip.cluster.ranks import Alone
from mpigossip.data import images
from mpigossip.store.dataset import open_dataset
from mpigossip.store.hdf5 import LIBVER
from mpigossip.store.packing import publish
from mpigossip.training import assemble, evaluate
from mpigossip.training.loop import NotFinite

TRAIN, VALIDATION = 45_000, 5_000
"""Images that are trained on, and images for validation, of CIFAR-10's 50,000."""
POINTS, CURVE = 8, 5
"""Evaluations of a reported run, on every CURVE-th test image."""

Task = tuple[dict[str, Any], Mapping[str, Any], int]
"""A run: what it is, its job, and the points of its curve."""


class OutOfTime(Exception):
    """A run that isn't known can't be done: the message says why."""


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables in one; later ones win."""
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            nested = isinstance(value, Mapping)
            result[key] = merged(result.get(key, {}), value) if nested else copy.copy(value)
    return result


def subsets(data: Path, folder: Path) -> dict[str, Path]:
    """The files "search" and "test" made of a packed CIFAR-10, as pixels.

    Both train on the same TRAIN training images (a permutation from seed 0 says which); the test
    half of "search" is the VALIDATION other training images, that of "test" the test images.
    """
    paths = {kind: folder / f"cifar10-{TRAIN}-{kind}.h5" for kind in ("search", "test")}
    if all(path.exists() for path in paths.values()):
        return paths
    with open_dataset(data) as packed:
        order = np.random.default_rng(0).permutation(len(packed.train))
        tested = np.arange(len(packed.test))
        facts = {"scale": packed.scale, "mean": packed.mean, "std": packed.std}
        facts |= {"channels": packed.channels, "format": packed.attributes["format"]}
        classes = packed.classes
    found = images.Images(images.Recipe(str(data), "none", None, "never"))
    train = ("train", order[:TRAIN])
    halves = {
        "search": {"train": train, "test": ("train", order[TRAIN:][:VALIDATION])},
        "test": {"train": train, "test": ("test", tested)},
    }
    for kind, splits in halves.items():
        temporary = paths[kind].with_suffix(".part")
        with h5py.File(temporary, "w", libver=LIBVER) as file:
            file.attrs.update(version=1, kind="arrays", source=f"a part of {data}", **facts)
            file["classes"] = np.array(classes, dtype=h5py.string_dtype())
            for name, (split, chosen) in splits.items():
                file[f"{name}/labels"] = found.data.split(split).labels[chosen]
                file[f"{name}/images"] = found.batch(split, chosen, ())
        publish(temporary, paths[kind])
    found.close()
    return paths


def train(
    table: Mapping[str, Any], nodes: int, points: int = 0, until: float = np.inf
) -> dict[str, Any]:
    """One run in the simulator: what it ended with and, at ``points`` steps, its curve.

    Without points the averaged model's validation accuracy alone. A loss that is no number any
    more ends the run with accuracy 0 and the step.
    """
    assembly = assemble.assemble(assemble.load(table), Alone(), nodes)
    trainer, curve = assembly.trainer, []
    steps = assembly.job.run.epochs * assembly.steps_per_epoch
    losses, apart, exchanges, begin = [], [], 0, time.monotonic()
    try:
        for step in range(1, steps + 1):
            record = trainer.step()
            losses.append(float(record.loss.mean()))
            apart.append(record.consensus_distance)
            exchanges += record.kind.name != "LOCAL"
            if points and step % (steps // points) == 0:
                curve.append((step, losses[-1], _accuracy(assembly, CURVE)))
            if time.monotonic() > until:
                raise OutOfTime("the time for training was up")
        if not points:
            return {"accuracy": _accuracy(assembly, 1), "curve": curve}
        final = evaluate.evaluate(trainer.replicas, trainer.mixer, assembly.loader)
    except NotFinite:
        return {"accuracy": 0.0, "diverged": len(losses), "curve": curve}
    finally:
        assembly.close()
    return {
        "accuracy": final.accuracy,
        "loss": final.loss,
        "local_accuracy": final.mean_local["accuracy"],
        "train_loss": float(np.mean(losses[-steps // 20 :])),
        "consensus": float(np.nanmean(apart)),
        "bytes": trainer.mixer.bytes_sent[0],
        "steps": steps,
        "exchanges": exchanges,
        "seconds": time.monotonic() - begin,
        "curve": curve,
    }


def _accuracy(assembly: assemble.Assembly, every: int) -> float:
    """Of the averaged model, on every so-many-th test image."""
    trainer = assembly.trainer
    module = evaluate.averaged_model(trainer.replicas, trainer.mixer)
    sums = evaluate.measure(trainer.replicas.objective, module, assembly.loader, 0, every)
    return float(sums[1, 0] / sums[1, 1])


def _do(task: Task, source: Path, until: float) -> dict[str, Any]:
    """One run, in a process of its own."""
    run, table, points = task
    torch.set_num_threads(1)
    fixed = {
        "run": {"seed": run["seed"], "epochs": run["epochs"]},
        "data": {"source": str(source), "workers": 0},
        "schedule": {"lr": run["lr"], "scale": "none"},
    }
    return train(merged(table, fixed), run["nodes"], points, until)


@dataclass
class Runs:
    """Finished runs by what they are, kept in the folder's `search.jsonl` and `runs.jsonl`."""

    kept: Path
    data: Path | None
    scratch: Path
    until: float = np.inf
    workers: int = 2
    entries: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        for file in (self._file("search"), self._file("test")):
            if file.exists():
                lines = file.read_text(encoding="utf-8").splitlines()
                self.entries += [json.loads(line) for line in lines]

    def _file(self, kind: str) -> Path:
        return self.kept / ("search.jsonl" if kind == "search" else "runs.jsonl")

    def known(self, run: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a run that was done."""
        return next((e["result"] for e in self.entries if e["run"] == run), None)

    def get(self, run: dict[str, Any], table: Mapping[str, Any], points: int = 0) -> dict[str, Any]:
        """The result of a run; ``run`` names it: kind, nodes, epochs, seed, lr and what it is."""
        self.fill([(run, table, points)])
        return self.known(run)

    def fill(self, tasks: Iterable[Task]) -> None:
        """Do what isn't known of these runs, ``workers`` at a time."""
        tasks = [task for task in tasks if self.known(task[0]) is None]
        if not tasks:
            return
        if self.data is None:
            raise OutOfTime("it needs --data")
        sources = subsets(self.data, self.scratch)
        with ProcessPoolExecutor(self.workers, mp_context=get_context("spawn")) as pool:
            doing = {pool.submit(_do, t, sources[t[0]["kind"]], self.until): t[0] for t in tasks}
            try:
                for done in as_completed(doing):
                    self._keep(doing[done], done.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _keep(self, run: dict[str, Any], result: dict[str, Any]) -> None:
        self.done += 1
        self.entries.append({"run": run, "result": result})
        with self._file(run["kind"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.entries[-1]) + "\n")
        shown = ", ".join(f"{k} {v:.5g}" for k, v in result.items() if k != "curve")
        print(f"{' '.join(map(str, run.values()))}: {shown}", flush=True)


@dataclass(frozen=True)
class Protocol:
    """A claim's file in `jobs/claims`."""

    name: str
    table: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Protocol:
        """The protocol that this file holds."""
        return cls(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))

    def job(self, case: str, method: str) -> dict[str, Any]:
        """The job of one method in one case, all but its rate and seed."""
        t = self.table
        exception = t.get("exceptions", {}).get(case, {}).get(method, {})
        return merged(t["job"], t["cases"][case], t["methods"][method], exception)

    def _run(self, kind: str, case: str, method: str, seed: int, lr: float) -> dict[str, Any]:
        epochs = self.table["search_epochs" if kind == "search" else "epochs"]
        named = {"claim": self.name, "case": case, "method": method, "kind": kind}
        batch = self.table["job"]["data"]["batch"]
        named |= {"nodes": self.table["nodes"], "batch": batch, "epochs": epochs}
        return named | {"seed": seed, "lr": lr}

    def _search(self, case: str, method: str, lr: float) -> Task:
        run = self._run("search", case, method, self.table["search_seed"], lr)
        return run, self.job(case, method), 0

    def searched(self, runs: Runs, case: str, method: str) -> tuple[dict[float, float], list[Task]]:
        """Validation accuracy by learning rate, and what has to be run to know more.

        The grid; one rate beyond where the best lies at an end; then the best's surroundings.
        """
        grid = [float(lr) for lr in self.table["grid"]]
        found: dict[float, float] = {}
        for further in (_beyond, _between, None):
            tasks = [self._search(case, method, lr) for lr in grid]
            missing = [task for task in tasks if runs.known(task[0]) is None]
            if missing:
                return found, missing
            found = {t[0]["lr"]: runs.known(t[0])["accuracy"] for t in tasks}
            if further:
                grid += further(sorted(found), max(found, key=found.__getitem__))
        return found, []

    def rate(self, runs: Runs, case: str, method: str) -> float:
        """The rate of the best validation accuracy."""
        found, missing = self.searched(runs, case, method)
        if missing:
            raise OutOfTime("its learning rate wasn't searched for: measure.py --search")
        return max(found, key=found.__getitem__)

    def report(self, runs: Runs, case: str, method: str, seed: int, **changes: Any) -> Task:
        """The run that counts, at the rate that was found; ``changes``: tables of the job."""
        run = self._run("test", case, method, seed, self.rate(runs, case, method))
        table = merged(self.job(case, method), changes)
        return run | ({"changes": changes} if changes else {}), table, POINTS

    def reported(self, runs: Runs, case: str, method: str, **changes: Any) -> list[dict[str, Any]]:
        """The results of these runs, one for each seed."""
        tasks = [self.report(runs, case, method, s, **changes) for s in self.table["seeds"]]
        runs.fill(tasks)
        return [runs.known(run) for run, *_ in tasks]

    def each(self) -> Iterator[tuple[str, str]]:
        """All cases and methods."""
        for case in self.table["cases"]:
            for method in self.table["methods"]:
                yield case, method


def _beyond(rates: list[float], best: float) -> list[float]:
    """One rate more where the best lies at an end, a factor away as the grid's rates are."""
    low, high = rates[0] / rates[1], rates[-1] / rates[-2]
    factor = {rates[0]: low, rates[-1]: high}.get(best)
    return [float(f"{best * factor:.1g}")] if factor else []


def _between(rates: list[float], best: float) -> list[float]:
    """The geometric means of the best rate and those beside it."""
    at = rates.index(best)
    beside = rates[max(0, at - 1) : at] + rates[at + 1 : at + 2]
    return [float(f"{math.sqrt(best * rate):.2g}") for rate in beside]


def search(runs: Runs, protocols: Iterable[Protocol]) -> None:
    """Find the learning rates that aren't known yet."""
    protocols = list(protocols)
    while tasks := [
        task for p in protocols for each in p.each() for task in p.searched(runs, *each)[1]
    ]:
        runs.fill(tasks)
