"""Which errors the command line turns into one paragraph, and with which exit code."""

import pytest

from mpigossip import cli
from mpigossip.cluster.agreement import CollectiveError
from mpigossip.cluster.deadline import WaitTimeoutError
from mpigossip.cluster.launcher import LaunchError
from mpigossip.config import JobError
from mpigossip.config.errors import FAILED, WRONG
from mpigossip.graphs import GraphError
from mpigossip.store import StoreError
from mpigossip.training.loop import NonFiniteError


class OwnError(StoreError):
    """Of a user's own source: a name that no list has."""


def ending(monkeypatch, error):
    def run(options):
        raise error

    monkeypatch.setattr(cli, "_parse", lambda words: type("Options", (), {"run": run}))
    return cli.main([])


@pytest.mark.parametrize("kind", [JobError, CollectiveError, GraphError, StoreError, OwnError])
def test_a_mistake_is_one_paragraph_and_code_2(monkeypatch, capsys, kind):
    assert ending(monkeypatch, kind("graph.n = 3: too few")) == WRONG
    assert capsys.readouterr().err == "mpigossip: graph.n = 3: too few\n"


@pytest.mark.parametrize("kind", [WaitTimeoutError, NonFiniteError])
def test_a_run_that_cannot_go_on_is_one_line_and_code_1(monkeypatch, capsys, kind):
    assert ending(monkeypatch, kind("rank 3 doesn't answer")) == FAILED
    assert capsys.readouterr().err == "mpigossip: rank 3 doesn't answer\n"


def test_of_many_processes_the_first_speaks(monkeypatch, capsys):
    assert ending(monkeypatch, LaunchError("no MPI", rank=1)) == WRONG
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", [ValueError, TimeoutError, ZeroDivisionError])
def test_other_errors_are_no_ones_mistake(monkeypatch, kind):
    with pytest.raises(kind):
        ending(monkeypatch, kind("a fault of the program"))
