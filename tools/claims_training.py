"""Runs for the training claims: LeNet on a part of CIFAR-10, all nodes simulated in this process.

A claim's protocol is a file `jobs/claims/NAME.toml`: nodes, steps, seeds, the grid of learning
rates, the job, and what differs between cases (data) and methods. Rates are searched for with one
seed on a validation set of training images that are not trained on; what is reported comes from
other seeds and test images. Each finished run is a line of a file, and is not done again.
"""

from __future__ import annotations

import copy
import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpigossip.cluster.ranks import Alone
from mpigossip.store.dataset import open_dataset
from mpigossip.store.hdf5 import LIBVER
from mpigossip.store.packing import publish
from mpigossip.training import evaluate, images, setup
from mpigossip.training.loop import NotFinite

TRAIN, TEST = 12_800, 5_000
"""Images that are trained on, and images for validation and for the test."""
POINTS, CURVE, VALIDATION = 8, 5, 2
"""Evaluations of a reported run, on every CURVE-th test image; a search's on every second one."""
EDGES = 1
"""How often a grid is extended by one rate."""


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
    """The part of a packed CIFAR-10 that is used: files "search" and "test", as pixels.

    Both hold the same TRAIN training images (a permutation from seed 0 says which); the test
    half of "search" is TEST other training images, that of "test" TEST test images.
    """
    paths = {kind: folder / f"cifar10-{TRAIN}-{kind}.h5" for kind in ("search", "test")}
    if all(path.exists() for path in paths.values()):
        return paths
    random = np.random.default_rng(0)
    with open_dataset(data) as packed:
        order = random.permutation(len(packed.train))
        tested = random.permutation(len(packed.test))[:TEST]
        facts = {"scale": packed.scale, "mean": packed.mean, "std": packed.std}
        facts |= {"channels": packed.channels, "format": packed.attributes["format"]}
        classes = packed.classes
    found = images.Images(images.Recipe(str(data), "none", None, "never"))
    halves = {
        "search": {"train": ("train", order[:TRAIN]), "test": ("train", order[TRAIN:][:TEST])},
        "test": {"train": ("train", order[:TRAIN]), "test": ("test", tested)},
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
    table: Mapping[str, Any], nodes: int, steps: int, points: int = 0, until: float = np.inf
) -> dict[str, Any]:
    """One run in the simulator: what it ended with and, at ``points`` steps, its curve.

    Without points the averaged model's validation accuracy alone. A loss that is no number any
    more ends the run with accuracy 0 and the step.
    """
    assembly = setup.assemble(setup.load(table), Alone(), nodes)
    trainer, curve = assembly.trainer, []
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
            return {"accuracy": _accuracy(assembly, VALIDATION), "curve": curve}
        final = evaluate.evaluate(trainer.replicas, trainer.mixer, assembly.loader)
    except NotFinite:
        return {"accuracy": 0.0, "diverged": len(losses), "curve": curve}
    finally:
        assembly.close()
    return {
        "accuracy": final.accuracy,
        "loss": final.loss,
        "local_accuracy": final.mean_local_accuracy,
        "train_loss": float(np.mean(losses[-steps // 20 :])),
        "consensus": float(np.nanmean(apart)),
        "bytes": trainer.mixer.bytes_sent[0],
        "exchanges": exchanges,
        "seconds": time.monotonic() - begin,
        "curve": curve,
    }


def _accuracy(assembly: setup.Assembly, every: int) -> float:
    """Of the averaged model, on every so-many-th test image."""
    trainer = assembly.trainer
    module = evaluate.averaged_model(trainer.replicas, trainer.mixer)
    sums = evaluate.measure(module, assembly.loader, 0, every)
    return float(sums[1] / sums[2])


@dataclass
class Runs:
    """Finished runs by what they are, kept in a file of one JSON object a line."""

    file: Path
    data: Path | None
    folder: Path
    until: float = np.inf
    entries: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.file.exists():
            lines = self.file.read_text(encoding="utf-8").splitlines()
            self.entries = [json.loads(line) for line in lines]

    def get(self, run: dict[str, Any], table: Mapping[str, Any], points: int = 0) -> dict[str, Any]:
        """The result of a run; ``run`` names it: kind, nodes, steps, seed, lr and what it is."""
        for entry in self.entries:
            if entry["run"] == run:
                return entry["result"]
        if self.data is None:
            raise OutOfTime("it needs --data")
        if time.monotonic() > self.until:
            raise OutOfTime("the time for training was up")
        source = subsets(self.data, self.folder)[run["kind"]]
        epochs = -(-run["steps"] * run["nodes"] * run["batch"] // TRAIN)
        fixed = {
            "run": {"seed": run["seed"], "epochs": epochs},
            "data": {"source": str(source), "workers": 0},
            "schedule": {"lr": run["lr"], "scale": "none"},
        }
        whole = merged({"schedule": {"name": "constant"}}, table, fixed)
        result = train(whole, run["nodes"], run["steps"], points, self.until)
        self.entries.append({"run": run, "result": result})
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.entries[-1]) + "\n")
        shown = ", ".join(f"{k} {v:.5g}" for k, v in result.items() if k != "curve")
        print(f"{' '.join(map(str, run.values()))}: {shown}", flush=True)
        return result


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
        steps = self.table["search_steps" if kind == "search" else "steps"]
        named = {"claim": self.name, "case": case, "method": method, "kind": kind}
        batch = self.table["job"]["data"]["batch"]
        named |= {"nodes": self.table["nodes"], "batch": batch, "steps": steps}
        return named | {"seed": seed, "lr": lr}

    def searched(self, runs: Runs, case: str, method: str) -> dict[float, float]:
        """Validation accuracy by learning rate: the grid, extended while the best is at an end."""
        case = self.table.get("rates_of", {}).get(case, case)

        def accuracy(lr: float) -> float:
            run = self._run("search", case, method, self.table["search_seed"], lr)
            return runs.get(run, self.job(case, method))["accuracy"]

        grid = self.table.get("grids", {}).get(method, self.table["grid"])
        found = {lr: accuracy(lr) for lr in grid}
        for _ in range(EDGES):
            best = max(found, key=found.__getitem__)
            if best not in (min(found), max(found)):
                break
            beyond = best / 3 if best == min(found) else best * 3
            found[float(f"{beyond:.1g}")] = accuracy(float(f"{beyond:.1g}"))
        return found

    def rate(self, runs: Runs, case: str, method: str) -> float:
        """The rate of the best validation accuracy."""
        found = self.searched(runs, case, method)
        return max(found, key=found.__getitem__)

    def reported(
        self, runs: Runs, case: str, method: str, seed: int, **changes: Any
    ) -> dict[str, Any]:
        """The run that counts, at the rate that was found; ``changes``: tables of the job."""
        run = self._run("test", case, method, seed, self.rate(runs, case, method))
        table = merged(self.job(case, method), changes)
        return runs.get(run | ({"changes": changes} if changes else {}), table, POINTS)

    def each(self) -> Iterator[tuple[str, str]]:
        """All cases and methods."""
        for case in self.table["cases"]:
            for method in self.table["methods"]:
                yield case, method
