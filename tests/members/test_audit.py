"""Models that are kept, and audits: rounds that are drawn and repeated from stored models."""

import functools
import random
import re
from collections.abc import Container
from dataclasses import replace

import numpy as np
import pytest

from mpigossip.config import JobError
from mpigossip.members.live import FolderExchange, StopRequested
from mpigossip.members.place import Place, TrainingPlan
from mpigossip.members.records import KEPT, RecordStore
from mpigossip.runs.members import replay
from mpigossip.runs.members.replay import ReplayLog, ReplayMismatch, audit
from mpigossip.store import StoreError
from tests.cases import naming
from tests.members.storm import Bad, Tiny, begin, member


class Forging(FolderExchange):
    """Exchange of a member whose model is changed after training some chunks."""

    forged: Container[int]
    tiny: Tiny

    def chunk(self):
        self.work = super().chunk()
        return self.work

    def send(self, state):
        if self.work[0] in self.forged:
            self.tiny.x = state.parameters + np.float32(1)
            state = replace(state, parameters=self.tiny.x)
        return super().send(state)


def log_of(root, plan) -> ReplayLog:
    return ReplayLog(Place(RecordStore(root), plan, report=lambda line: None))


def train(root, plan, forged=()) -> ReplayLog:
    """Train all chunks in one place; the models after the chunks ``forged`` are wrong."""
    begin(root)
    live = Forging(Place(RecordStore(root), plan, report=lambda line: None), lambda: False, 0.01)
    live.forged = forged
    with live.stay():
        live.tiny = tiny = Tiny()
        tiny.begin(live.begin({}))
        tiny.train(live)
    live.close()
    return log_of(root, plan)


def test_kept_models_are_never_removed(tmp_path):
    begin(root := tmp_path / "run")
    plan = TrainingPlan(60, 2, 60.0, keep_every=2)
    for seed in range(60):

        def leave(rounds=iter(range(5))):  # noqa: B008
            if next(rounds, None) is None:
                raise StopRequested

        if member(Bad(root, random.Random(seed)), plan, sleep=leave) == "end":
            break
    script = log_of(root, plan)
    assert len(script.rounds) == 60
    kept = {path.name for path in (root / "models").glob(f"*{KEPT}")}
    assert kept == {
        record.file for version, record in script.rounds.items() if version.round % 2 == 0
    }
    assert len(list((root / "models").iterdir())) < 30 + 40


def test_an_audit_detects_a_wrong_record_if_it_is_drawn(tmp_path, monkeypatch):
    """One of 100 rounds is wrong and a tenth is drawn: one audit in ten detects it."""
    monkeypatch.setattr(replay, "read_model", functools.cache(replay.read_model))
    script = train(tmp_path / "run", TrainingPlan(100, 4, 60.0, keep_every=1), forged=(42,))
    (wrong,) = [version for version, record in script.rounds.items() if record.chunk == 42]
    detected = 0
    for seed in range(100):
        try:
            summary = audit(script, 0.1, Tiny(), random.Random(seed))
            assert summary.startswith("10 of 100 rounds drawn")
        except ReplayMismatch as error:
            assert re.search(naming(f"round {wrong.round}", f"place {wrong.place}"), str(error))
            detected += 1
    # 10 are expected; the probability of less than 3 or more than 20 is below 0.3 %.
    assert 3 <= detected <= 20, detected
    with pytest.raises(ReplayMismatch, match=naming(f"round {wrong.round}")):
        audit(script, 1.0, Tiny(), random.Random(0))


def test_an_audit_names_the_first_of_several_differences(tmp_path):
    forged = 2, 5, 9
    script = train(tmp_path / "run", TrainingPlan(12, 4, 60.0, keep_every=1), forged)
    first = min(v.round for v, record in script.rounds.items() if record.chunk in forged)
    with pytest.raises(ReplayMismatch, match=naming(f"round {first}", "place 0")):
        audit(script, 1.0, Tiny(), random.Random(0))


def test_an_audit_needs_all_models(tmp_path):
    plan = TrainingPlan(12, 4, 60.0)
    script = train(tmp_path / "run", plan)
    with pytest.raises(JobError, match=naming("members.keep_every = 0", "members.keep_every = 1")):
        audit(script, 0.1, Tiny(), random.Random(0))
    script = train(tmp_path / "kept", plan._replace(keep_every=1))
    assert "12 of 12 rounds" in audit(script, 1.0, Tiny(), random.Random(0))
    lost = script.rounds[0, 4]
    (tmp_path / "kept" / "models" / lost.file).unlink()
    with pytest.raises(StoreError, match=naming("chain/000000/000004")):
        audit(script, 1.0, Tiny(), random.Random(0))
    begin(tmp_path / "empty")
    with pytest.raises(JobError, match=naming("no rounds")):
        audit(log_of(tmp_path / "empty", plan._replace(keep_every=1)), 1, Tiny(), random.Random(0))
