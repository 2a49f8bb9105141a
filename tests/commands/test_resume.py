"""`mpigossip resume` before MPI has started."""

import contextlib

import pytest

from mpigossip import cli
from mpigossip.cluster import process
from mpigossip.runs import start_and_resume
from mpigossip.store import checkpoint
from tests.jobs import TINY


class Begun(Exception):
    """Raised in place of a start of MPI."""


@pytest.mark.parametrize("further, limit", [([], 7.0), (["node.timeout_s=9"], 9.0)])
def test_mpi_starts_with_the_time_limit_of_the_resumed_run(tmp_path, monkeypatch, further, limit):
    (tmp_path / "job.toml").write_text('[run]\nname = "x"\n')
    settings = [*TINY, "run.steps=2", "node.timeout_s=7", f"run.output={tmp_path / 'run'}"]
    assert cli.main(["simulate", str(tmp_path / "job.toml"), "--nodes", "2", *settings]) == 0
    given = []

    def begin(folder, timeout_s=process.TIMEOUT_S, devices="auto"):
        given.append((folder, timeout_s))
        raise Begun

    monkeypatch.setattr(process, "before_mpi", begin)
    with contextlib.suppress(Begun):
        cli.main(["resume", str(tmp_path / "run"), *further])
    (checkpoint.latest(tmp_path / "run") / "checkpoint.h5").unlink()
    with contextlib.suppress(Begun):
        cli.main(["resume", str(tmp_path / "run")])
    assert given == [(tmp_path / "run", limit), (tmp_path / "run", process.TIMEOUT_S)]


def test_a_run_that_keeps_a_cadence_which_the_new_algorithm_does_not_imply_says_so(
    tmp_path, monkeypatch, capsys
):
    """DiLoCo would average in each step if the run was started with dsgd."""
    (tmp_path / "job.toml").write_text('[run]\nname = "x"\n')
    start = [*TINY, "algorithm.name=dsgd", "run.steps=2", f"run.output={tmp_path / 'run'}"]
    assert cli.main(["simulate", str(tmp_path / "job.toml"), "--nodes", "2", *start]) == 0
    capsys.readouterr()
    monkeypatch.setattr(start_and_resume, "run", lambda *_: {})
    words = ["cadence.name=cpsgd", '"always"', "algorithm.name"]
    for further, says in (
        (["algorithm.name=diloco"], True),
        (["algorithm.name=diloco", "cadence.name=cpsgd"], False),
        (["algorithm.name=dmsgd"], False),
        ([], False),
    ):
        cli.main(["resume", str(tmp_path / "run"), "--simulate", *further])
        printed = "".join(capsys.readouterr())
        assert all(word in printed for word in words) == says, printed
