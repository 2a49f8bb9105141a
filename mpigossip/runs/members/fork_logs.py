"""Logs of the places of a fork, with the columns of the training's logs, but without times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip import config
from mpigossip.cluster.world import SingleProcess
from mpigossip.engine.measurements import StepMetrics
from mpigossip.members.records import Version
from mpigossip.runs.members.member import Member
from mpigossip.runs.members.replay import ReplayLog
from mpigossip.runs.progress import Progress
from mpigossip.runs.recorder import Recorder
from mpigossip.runs.summary import SPLIT
from mpigossip.store import StoreError
from mpigossip.store.log import read
from mpigossip.training.evaluate import Evaluation

NAN = float("nan")
TIMES = ("time", "samples_per_second", *SPLIT)
"""Columns without values in the logs of a fork, because one process repeats the rounds of all
places, one after the other. Copied rows have no times either: otherwise, they would be mistaken for
times of the fork."""


class ForkLogs:
    """Logs of the places of a fork.

    Rows of rounds up to the cut, which the fork may read instead of repeating them, are copied from
    the logs of the training. If the training has no log of a place, or if rows are missing between
    the copied ones and later ones, nothing is copied.
    """

    def __init__(
        self,
        folder: Path,
        run: Path,
        member: Member,
        log: ReplayLog,
        past: Iterable[Version],
        steps: Callable[[Version], int],
    ):
        """Begin the logs of all places that have rounds up to the cut.

        :param folder: folder of the fork
        :param run: folder of the training
        :param member: member that trains the rounds after the cut
        :param log: records of the fork
        :param past: rounds up to the cut
        :param steps: function that returns the number of steps of a round
        :raises StoreError: if a log can't be written
        """
        self._folder = folder
        self._run = run
        self._member = member
        self._log = log
        self._recorders: dict[int, Recorder] = {}
        self._progress: dict[int, Progress] = {}
        self._pending: Counter[int] = Counter()
        self._sent: defaultdict[int, int] = defaultdict(int)
        """Number of bytes that each place has sent so far."""
        self._round_steps = {version: steps(version) for version in log.rounds}
        """Number of steps of each round."""
        self._steps_before: dict[Version, int] = {}
        """For each round, the number of steps that its place has made before."""
        self._history: dict[Version, int] = {}
        """Number of steps in the longest history of the model after each round."""
        done: Counter[int] = Counter()
        for version in sorted(log.rounds, key=lambda version: (log.round(version).age, version)):
            self._steps_before[version] = done[version.place]
            done[version.place] += self._round_steps[version]
            before = max((self._history[model] for model in log.inputs(version)), default=0)
            self._history[version] = before + self._round_steps[version]
        copied: Counter[int] = Counter()
        for version in past:
            copied[version.place] += self._round_steps[version]
        for place, count in copied.items():
            self._copy(place, count, done[place] > count)

    def _copy(self, place: int, steps: int, continues: bool) -> None:
        """Begin the log of a place with the rows of its rounds up to the cut.

        :param place: number of the place
        :param steps: number of steps of these rounds
        :param continues: whether the place has rounds after the cut
        """
        try:
            recorded = read(self._run / "logs" / f"{place:06d}" / "log.h5")
        except StoreError:
            self._begin(place, steps)
            return
        kept = recorded.steps["step"] < steps
        count = np.count_nonzero(kept)
        # A member that was killed has lost its last rows. No row can follow a gap.
        has_gap = count < steps and continues
        if not count or has_gap or recorded.nodes != 1:
            self._begin(place, steps)
            return
        rows = {name: values[kept] for name, values in recorded.steps.items()}
        rows |= {name: np.full((count, 1), NAN) for name in TIMES}
        self._begin(place, 0).copy(rows)
        if "bytes_sent" in rows:
            self._sent[place] = int(rows["bytes_sent"][-1, 0])

    def after(self, version: Version) -> Callable[[StepMetrics, int], None]:
        """Return the function to call after each step of a round that is repeated.

        :param version: the round, which is after the cut
        """
        place = version.place
        log = self._log
        first = self._steps_before[version]
        if place not in self._recorders:
            self._begin(place, first)
        count = self._round_steps[version]
        inputs = log.inputs(version)
        own = inputs if version.round == 1 else inputs[:1]
        history = max((self._history[model] for model in own), default=0)
        age = max((log.round(model).age for model in own), default=0)
        mixer = self._member.mixer
        sent_before = self._sent[place] - int(mixer.bytes_sent[0])
        trained = 0

        def log_step(record: StepMetrics, chunk: int) -> None:
            nonlocal trained, history, age
            index = first + trained
            trained += 1
            number = version.round
            history += 1
            # As in the log of a member, the last step of a round already belongs to the next one.
            if trained == count:
                history = self._history[version]
                age = log.round(version).age
                number += 1
            following = log.rounds.get(Version(place, number))
            peer = following.peer[0] if following and following.peer else None
            self._sent[place] = sent_before + int(mixer.bytes_sent[0])
            record = replace(
                record,
                index=index,
                consensus_distance=NAN,
                # The average with the peer is computed at the beginning of the next round.
                mixed_distance=record.mixed_distance * NAN,
                seconds=dict.fromkeys(record.seconds, NAN),
                bytes_sent=[self._sent[place]],
                staleness=[float(age - log.round(peer).age) if peer else NAN],
            )
            record.metrics |= {
                "chunk": chunk,
                "round": number,
                "time": NAN,
                "peer": peer.place if peer else NAN,
                "history": history - 1,
            }
            self._append(place, record)

        return log_step

    def end(self, evaluation: Evaluation, stored: dict[str, Any], steps: int) -> None:
        """Write all rows, and the evaluation and the summary of the places of the result.

        :param evaluation: evaluation of the average of the last models
        :param stored: path and digest of the checkpoint, for the summary
        :param steps: number of steps of the whole training
        """
        for recorder in self._recorders.values():
            recorder.flush()
        for version in self._log.end:
            recorder = self._recorders[version.place]
            progress = self._progress[version.place]
            recorder.evaluation(progress, steps, evaluation)
            summary = {
                "finished": True,
                "steps": steps,
                "epochs": progress.epoch(steps),
                "nodes": 1,
                "slots": self._member.engine.group.slots,
                "seconds": NAN,
                "bytes_sent": float(self._sent[version.place]),
                "metrics": " ".join(progress.objective.metrics),
                **evaluation.averaged,
                **stored,
            }
            recorder.stop(progress, summary)

    def _begin(self, place: int, first_step: int) -> Recorder:
        """Begin the log of a place, in which the first row will be ``first_step``."""
        assembly = self._member.assembly
        job = assembly.parts.job
        progress = Progress(
            job=job,
            folder=self._folder / "logs" / f"{place:06d}",
            nodes=1,
            asked=1,
            steps_per_epoch=assembly.steps_per_epoch,
            objective=assembly.trainer.replicas.objective,
            text=config.dump(job),
            first_step=first_step,
            seconds_before=NAN,
        )
        recorder = Recorder(SingleProcess())
        recorder.start(progress, assembly)
        self._recorders[place] = recorder
        self._progress[place] = progress
        return recorder

    def _append(self, place: int, record: StepMetrics) -> None:
        """Append a row to the log of a place; write rows to the file from time to time."""
        progress = self._progress[place]
        self._recorders[place].step(progress, record)
        self._pending[place] += 1
        if self._pending[place] % progress.job.log.flush_steps == 0:
            self._recorders[place].flush()
