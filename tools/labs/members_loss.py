"""Compare trainings by members with `mpigossip simulate`, at equal numbers of samples.

    python tools/labs/members_loss.py [--members 4 8] [--seeds 5] [SECTION.KEY=VALUE …]
    python tools/labs/members_loss.py --members 4 --newcomers

For each number of members, the program prints by how much their test loss differs from the loss of
`simulate`, and the staleness ("lag") of received models in rounds. With ``--newcomers``, it also
prints how the test loss changes when further members join.

All members are threads with a virtual clock. A round takes 0.95 to 1.05 units of its time, and
other members can read the model of a round ``--delay`` units after its last step. The staleness is
therefore as on separate machines, even if this machine is busy. Every run is replayed, unless
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
from mpigossip.cluster.world import SingleProcess  # noqa: E402
from mpigossip.members.live import FolderExchange, StopRequested, read_model  # noqa: E402
from mpigossip.members.place import Place  # noqa: E402
from mpigossip.members.records import RecordStore  # noqa: E402
from mpigossip.runs import start_and_resume  # noqa: E402
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
    """Virtual time of several threads: the thread with the earliest time runs, the others wait."""

    def __init__(self, threads: int):
        """Create the clock for this number of threads, which must call `wait` first of all."""
        self.turn = threading.Condition()
        self.running = threads
        self.times = dict[int, float]()

    def wait(self, until: float) -> None:
        """Let this thread wait until all other threads have reached the virtual time ``until``."""
        me = threading.get_ident()
        with self.turn:
            self.times[me] = until
            self._stop()
            self.turn.wait_for(lambda: not self.running and self.first == me)
            del self.times[me]
            self.running += 1

    def _stop(self) -> None:
        """Mark this thread as not running; the caller holds the lock of ``turn``."""
        self.running -= 1
        self.turn.notify_all()

    @property
    def first(self) -> int:
        """Identifier of the waiting thread with the earliest time."""
        return min(self.times, key=self.times.__getitem__)

    def run(self, work, *arguments) -> None:
        """Call ``work(*arguments)``; when it returns or raises, the other threads continue."""
        try:
            work(*arguments)
        finally:
            with self.turn:
                self._stop()


class Writer:
    """Substitute for the executor that writes models; it writes when the result is requested."""

    def submit(self, work) -> Future:
        """Return a future that calls ``work`` when its result is requested."""
        future = Future()
        future.result = work
        return future

    def shutdown(self) -> None:
        """Do nothing, because there is no thread."""


class Paced(FolderExchange):
    """Exchange of a member whose rounds take virtual time."""

    def __init__(self, lab: "Lab", index: int, at: float):
        """Prepare a member that joins a training.

        :param lab: the training
        :param index: number of the member, which seeds its random numbers
        :param at: virtual time at which the member joins
        """
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
        """Let the virtual time of a round pass, and publish the model at its end."""
        slow = 1.0 if self.index else self.lab.options.slow
        self.at += slow * self.chance.uniform(0.95, 1.05)
        self.lab.clock.wait(self.at)
        self.lab.newest[self.index] = state
        return super().send(state)

    def receive(self):
        """Receive the model of a peer, and write this member's own model only ``delay`` later.

        In a real training, a thread writes the own model while the peer's model is received.
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
        """Return the next chunk; wait in virtual time while others train the last chunks."""
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

    The attribute ``newest`` contains the last model that each member has sent, by its number;
    ``lags`` the staleness of received models in rounds; ``rises`` the relative changes of the test
    loss when a newcomer joins, and one round later.
    """

    def __init__(self, folder: Path, members: int, seed: int, options):
        """Prepare the training.

        :param folder: folder of the training, which must not exist
        :param members: number of members, without newcomers
        :param seed: seed of the job and of the members' random numbers
        :param options: options of the command line
        """
        self.folder = folder
        self.members = members
        self.seed = seed
        self.options = options
        self.newest = {}
        self.lags = list[int]()
        self.rises = list[tuple[float, float]]()
        self.clock = Clock(members + options.newcomers)

    def run(self) -> dict:
        """Train, and replay the training unless the option "unrepeated" is set.

        :return: test loss and accuracy of the average of the last models; mean of ``lags`` as
            "lag"; number of places; ``rises``
        """
        with SingleProcess() as world:
            job = job_of(self.seed, self.members * self.options.steps, self.options)
            assemblies = [assemble(job, world, 1) for _ in range(self.members + 2)]
            self.folder.mkdir()
            join.job_of(self.folder, job, RecordStore(self.folder))
            self.plan = join.plan_of(assemblies[0], 1e9)
            self.spare = Member(assemblies[-1])
            works = [(self.member, i, Member(assemblies[i])) for i in range(self.members)]
            if self.options.newcomers:
                works.append((self.newcomers, self.members, Member(assemblies[-2])))
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
            for assembly in assemblies:
                assembly.close()
        places = len(list((self.folder / "places").iterdir()))
        return {**results, "lag": np.mean(self.lags), "places": places, "rises": self.rises}

    def test(self, states) -> dict[str, float]:
        """Return loss and accuracy of the average of these models on the test set."""
        self.spare.begin(states)
        trainer = self.spare.trainer
        loader = self.spare.assembly.loader
        return evaluate(trainer.replicas, trainer.mixer, loader).averaged

    def member(self, index: int, member: Member) -> None:
        """Train as a member that joins at a random time in the first round and stays to the end.

        :param index: number of the member
        :param member: member that computes the steps
        """
        live = Paced(self, index, random.Random(self.seed + index).random())
        self.clock.wait(live.at)
        while not live.place.ended():
            with live.stay():
                member.begin(live.begin({}))
                member.train(live)

    def newcomers(self, index: int, member: Member) -> None:
        """Let a new member join every 20 rounds, and leave early in its second round.

        Append to ``rises`` how the test loss of the average changes when it joins, and after its
        first round.

        :param index: number of the new members
        :param member: member that computes their steps
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
    """Return the settings of all runs; they lack "algorithm.style" if an algorithm is chosen."""
    chosen = any(word.startswith("algorithm.name=") for word in options.settings)
    return [word for word in JOB if not (chosen and "style" in word)] + options.settings


def job_of(seed: int, steps: int, options, *settings: str):
    """Return the job of a run: jobs/digits.toml with the settings of all runs.

    :param seed: seed of the run
    :param steps: number of steps, the setting run.steps
    :param options: options of the command line
    :param settings: further settings "section.key=value"
    """
    words = [*settings_of(options), f"run.seed={seed}", f"run.steps={steps}", *settings]
    return load(REPOSITORY / "jobs" / "digits.toml", words)


def run_one(arguments) -> dict:
    """Run one training, either by members or by `simulate`; return its measurements.

    :param arguments: number of members, or of nodes; seed; options of the command line; whether to
        use `simulate`
    """
    members, seed, options, simulated = arguments
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        SingleProcess() as world,
    ):
        if not simulated:
            return Lab(Path(folder) / "run", members, seed, options).run()
        job = job_of(seed, options.steps, options, f"run.output={folder}/run")
        return start_and_resume.train(job, world, members)


def append_line(run: dict, members: int, seed: int, options, simulated: bool) -> dict:
    """Append the measurements of a run to the file ``--lines``, if given; return them unchanged.

    :param run: measurements of the run, the result of `run_one`
    :param members: number of members, or of nodes
    :param seed: seed of the run
    :param options: options of the command line
    :param simulated: whether `simulate` has made the run
    """
    figures = {k: run[k] for k in ("loss", "accuracy", "lag", "places", "digest") if k in run}
    line = {
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
            file.write(json.dumps(line) + "\n")
    return run


def percent(values) -> str:
    """Format the mean of fractions, one for each seed, and its 95 % interval as percentages."""
    mean, half = (100 * float(column[0]) for column in interval(np.reshape(values, (-1, 1))))
    return f"{mean:+.1f} % [{mean - half:.1f}, {mean + half:.1f}]"


def main() -> int:
    """Print a line for each number of members, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each member")
    parser.add_argument("--delay", type=float, default=0.2, help="delay of a model in rounds")
    parser.add_argument(
        "--slow", type=float, default=1.0, help="factor by which the first member is slower"
    )
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
                append_line(run, *work)
                for work, run in zip(works, pool.imap(run_one, works), strict=True)
            ]
            gossip = results[: len(seeds)]
            baseline = results[len(seeds) :]
            pairs = list(zip(gossip, baseline, strict=True))
            points = np.mean([100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs])
            above = percent([a["loss"] / b["loss"] - 1 for a, b in pairs])
            print(
                f"{members} members: loss {above} and accuracy {points:+.1f} points relative to "
                f"`simulate`, lag {np.mean([a['lag'] for a in gossip]):.2f} rounds, "
                f"{sum(a['places'] for a in gossip)} places; mean loss of `simulate` "
                f"{np.mean([b['loss'] for b in baseline]):.4f}",
                flush=True,
            )
            rises = 100 * np.array([rise for a in gossip for rise in a["rises"]]).reshape(-1, 2)
            if len(rises):
                at_once, later = np.median(rises, 0)
                print(
                    f"  {len(rises)} newcomers change the loss by {at_once:+.2f} % in the median "
                    f"when they join (95 % quantile {np.quantile(rises[:, 0], 0.95):+.2f} %), and "
                    f"by {later:+.2f} % after one round",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
