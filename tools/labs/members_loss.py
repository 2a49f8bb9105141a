"""Compare trainings by members with `mpigossip simulate`, at equal numbers of samples.

    python tools/labs/members_loss.py [--members 4 8] [--seeds 5] [SECTION.KEY=VALUE …]
    python tools/labs/members_loss.py --members 4 --newcomers

The program prints the test loss, the staleness ("lag") of received models, and the effect of
members that join later.

All members are threads with a virtual clock. A round takes 1 ± 5 % units of its time, and other
members see the model of a round ``--delay`` units after its last step. The staleness is therefore
that of members on separate machines, even if this machine is busy. Every run is replayed, unless
``--unrepeated`` is given.
"""

import argparse
import io
import json
import multiprocessing
import random
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from mpigossip.cluster.ranks import SingleProcess  # noqa: E402
from mpigossip.members.live import FolderExchange, StopRequested, read_model  # noqa: E402
from mpigossip.members.place import Place  # noqa: E402
from mpigossip.members.records import RecordStore  # noqa: E402
from mpigossip.runs import launch  # noqa: E402
from mpigossip.runs.members import join, replay  # noqa: E402
from mpigossip.runs.members.member import Member, average  # noqa: E402
from mpigossip.studies.seeds import interval  # noqa: E402
from mpigossip.training.assemble import assemble, load  # noqa: E402
from mpigossip.training.evaluate import evaluate  # noqa: E402

JOB = [
    "model.name=mlp",
    "algorithm.style=atc",
    "local.name=adamw",
    "schedule.lr=0.001",
    "cadence.name=every",
    "cadence.period=4",
    "run.evaluate_every=0",
    "run.epochs=1000000",
    "checkpoint.every_steps=0",
]


class Clock:
    """Virtual time of several threads. Only the thread whose time is the earliest may compute."""

    def __init__(self, threads: int):
        """Create the clock for a number of threads, each of which has to begin with `wait`."""
        self.turn = threading.Condition()
        self.running = threads
        self.times = dict[int, float]()

    def wait(self, until: float) -> None:
        """Let this thread wait, and the others run, until the virtual time ``until``."""
        me = threading.get_ident()
        with self.turn:
            self.times[me] = until
            self._stop()
            self.turn.wait_for(lambda: not self.running and self.first == me)
            del self.times[me]
            self.running += 1

    def _stop(self) -> None:
        self.running -= 1
        self.turn.notify_all()

    @property
    def first(self) -> int:
        """Number of the thread whose time is the earliest."""
        return min(self.times, key=self.times.__getitem__)

    def run(self, work, *given) -> None:
        """Call ``work`` in this thread; if it raises an error, the other threads continue."""
        try:
            work(*given)
        finally:
            with self.turn:
                self._stop()


class Writer:
    """Substitute for the thread that writes models. It writes when the result is requested."""

    def submit(self, work) -> Future:
        """Return a future whose result is computed when it is requested."""
        made = Future()
        made.result = work
        return made

    def shutdown(self) -> None:
        """Do nothing, because there is no thread."""


class Paced(FolderExchange):
    """Exchange of a member whose rounds take virtual time."""

    def __init__(self, lab: "Lab", index: int, at: float):
        """Join the training ``lab`` at the virtual time ``at``."""
        self.lab = lab
        self.index = index
        self.at = at
        self.chance = random.Random(1000 * lab.seed + index)
        place = Place(
            RecordStore(lab.folder),
            lab.plan,
            chance=self.chance,
            now=lambda: self.at,
            report=lambda _: None,
        )
        super().__init__(place, lambda: False, 0.0)
        self._writer = Writer()

    def send(self, state) -> int:
        """Publish the model at the end of a round."""
        slow = 1.0 if self.index else self.lab.options.slow
        self.at += slow * self.chance.uniform(0.95, 1.05)
        self.lab.clock.wait(self.at)
        self.lab.newest[self.index] = state
        return super().send(state)

    def receive(self):
        """Receive the peer's model before this member's own model is written.

        This happens if a thread writes the own model meanwhile.
        """
        state = super().receive()
        place = self.place
        if state is not None:
            self.lab.lags.append(place.age - place.peer.age)
        self.at += self.lab.options.delay
        self.lab.clock.wait(self.at)
        self.at -= self.lab.options.delay
        self.written()
        return state

    def chunk(self):
        """Wait in virtual time while other members train the last chunks."""
        while not self.place.remaining and not self.place.ended():
            self.written()
            if self.place.chunk() is not None or self.place.ledger.finished:
                break
            self.lab.newest.pop(self.index, None)
            self.at += 1
            self.lab.clock.wait(self.at)
        return super().chunk()


class Lab:
    """One training by members in a folder.

    The attribute ``newest`` contains the last model that each member has sent.
    """

    def __init__(self, folder: Path, members: int, seed: int, options):
        """Prepare the training; ``options`` are the command's options."""
        self.folder = folder
        self.members = members
        self.seed = seed
        self.options = options
        self.newest = {}
        self.lags = list[int]()
        self.rises = list[tuple[float, float]]()
        self.clock = Clock(members + options.newcomers)

    def run(self) -> dict:
        """Train; return the test loss of the average at the end, and the other measurements."""
        with SingleProcess() as world:
            job = job_of(self.seed, self.members * self.options.steps, self.options)
            made = [assemble(job, world, 1) for _ in range(self.members + 2)]
            self.folder.mkdir()
            join.job_of(self.folder, job, RecordStore(self.folder))
            self.plan = join.plan_of(made[0], 1e9)
            self.spare = Member(made[-1])
            works = [(self.member, i, Member(made[i])) for i in range(self.members)]
            if self.options.newcomers:
                works.append((self.newcomers, self.members, Member(made[-2])))
            with ThreadPoolExecutor(len(works)) as pool:
                for future in [pool.submit(self.clock.run, *work) for work in works]:
                    future.result()
            if not self.options.unrepeated:
                replay.replay(self.folder)
            reader = Place(RecordStore(self.folder), self.plan)
            versions = reader.ended().versions
            results = self.test(
                [read_model(reader, reader.record(*version)) for version in versions]
            )
            for member in made:
                member.close()
        places = len(list((self.folder / "places").iterdir()))
        return {**results, "lag": np.mean(self.lags), "places": places, "rises": self.rises}

    def test(self, states) -> dict[str, float]:
        """Return loss and accuracy of the average of these models."""
        self.spare.begin(states)
        trainer = self.spare.trainer
        loader = self.spare.assembly.loader
        return evaluate(trainer.replicas, trainer.mixer, loader).averaged

    def member(self, index: int, member: Member) -> None:
        """Train as a member that joins at a random time in the first round and stays to the end."""
        live = Paced(self, index, random.Random(self.seed + index).random())
        self.clock.wait(live.at)
        while not live.place.ended():
            with live.stay():
                member.begin(live.begin({}))
                member.train(live)

    def newcomers(self, index: int, member: Member) -> None:
        """Let a member join every 20 rounds, and leave two rounds later.

        Record how the test loss of the average changes.
        """
        rounds = self.options.steps // member.steps
        for at in range(rounds // 5, rounds * 4 // 5, 20):
            live = Paced(self, index, at + 0.5)
            losses = []
            self.clock.wait(live.at)
            others = list(self.newest.values())
            states = live.begin({})
            for models in (others, [*others, average(states)]):
                losses.append(self.test(models)["loss"])
            member.begin(states)

            def after(record, chunk, losses=losses, live=live) -> None:
                if member.done == member.steps + 1:
                    losses.append(self.test([*self.newest.values()])["loss"])
                    raise StopRequested

            try:
                with live.stay():
                    member.train(live, after)
            except StopRequested:
                self.newest.pop(index, None)
            self.rises.append((losses[1] / losses[0] - 1, losses[2] / losses[0] - 1))


def settings_of(options) -> list[str]:
    """Return the settings of all runs. The option "style" is set only for the algorithm dsgd."""
    named = any(word.startswith("algorithm.name=") for word in options.settings)
    return [one for one in JOB if not (named and "style" in one)] + options.settings


def job_of(seed: int, steps: int, options, *settings: str):
    """Return the job of a run."""
    words = [*settings_of(options), f"run.seed={seed}", f"run.steps={steps}", *settings]
    return load(REPOSITORY / "jobs" / "digits.toml", words)


def one(given) -> dict:
    """Run one training, either by members or by `simulate`; return its measurements."""
    members, seed, options, simulated = given
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        SingleProcess() as world,
    ):
        if not simulated:
            return Lab(Path(folder) / "run", members, seed, options).run()
        job = job_of(seed, options.steps, options, f"run.output={folder}/run")
        return launch.train(job, world, members)


def kept(run: dict, members: int, seed: int, options, simulated: bool) -> dict:
    """Append the results of a run to the file of ``--lines``, if given, and return the run."""
    figures = {k: run[k] for k in ("loss", "accuracy", "lag", "places", "digest") if k in run}
    made = {
        "members": members,
        "seed": seed,
        "how": "simulate" if simulated else "members",
        "steps": options.steps,
        "delay": None if simulated else options.delay,
        "slow": None if simulated else options.slow,
        "settings": settings_of(options),
        "torch": torch.__version__,
        "figures": figures,
    }
    if options.lines:
        with options.lines.open("a") as file:
            file.write(json.dumps(made) + "\n")
    return run


def percent(values) -> str:
    """Return the mean over seeds and its 95 % interval, as text."""
    mean, half = (100 * float(one[0]) for one in interval(np.reshape(values, (-1, 1))))
    return f"{mean:+.1f} % [{mean - half:.1f}, {mean + half:.1f}]"


def main() -> int:
    """Print a line for each number of members."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each member")
    parser.add_argument("--delay", type=float, default=0.2, help="delay of a model in rounds")
    parser.add_argument("--slow", type=float, default=1.0, help="round of the first member")
    parser.add_argument("--lines", type=Path, help="append a line of JSON per run to this file")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--unrepeated", action="store_true", help="do not replay the runs")
    parser.add_argument("--newcomers", action="store_true", help="a member joins every 20 rounds")
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    seeds = range(100, 100 + options.seeds)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for members in options.members:
            works = [(members, seed, options, kind) for kind in (False, True) for seed in seeds]
            results = [
                kept(run, *work) for work, run in zip(works, pool.imap(one, works), strict=True)
            ]
            gossip = results[: len(seeds)]
            baseline = results[len(seeds) :]
            pairs = list(zip(gossip, baseline, strict=True))
            points = np.mean([100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs])
            above = percent([a["loss"] / b["loss"] - 1 for a, b in pairs])
            print(
                f"{members} members: loss {above}, accuracy {points:+.1f} points, "
                f"lag {np.mean([a['lag'] for a in gossip]):.2f}, "
                f"places {sum(a['places'] for a in gossip)}, simulate's loss "
                f"{np.mean([b['loss'] for b in baseline]):.4f}",
                flush=True,
            )
            rises = 100 * np.array([rise for a in gossip for rise in a["rises"]]).reshape(-1, 2)
            if len(rises):
                at_once, later = np.median(rises, 0)
                print(
                    f"  {len(rises)} newcomers: {at_once:+.2f} % at once (95 %: "
                    f"{np.quantile(rises[:, 0], 0.95):+.2f} %), {later:+.2f} % a round later",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
