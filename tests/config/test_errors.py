"""Errors that the command line prints as one paragraph, and their exit codes."""

import pytest

from mpigossip import cli
from mpigossip.cluster.communicator import CollectiveError
from mpigossip.cluster.deadline import WaitTimeoutError
from mpigossip.cluster.launcher import LaunchError
from mpigossip.config import JobError
from mpigossip.config.errors import FAILED, WRONG
from mpigossip.graphs import GraphError
from mpigossip.store import StoreError
from mpigossip.training.loop import NonFiniteError


class OwnError(StoreError):
    """User error of a custom data source; this package does not know its class."""


def ending(monkeypatch, error):
    def run(options):
        raise error

    monkeypatch.setattr(cli, "_parse", lambda words: type("Options", (), {"run": run}))
    return cli.main([])


@pytest.mark.parametrize("kind", [JobError, CollectiveError, GraphError, StoreError, OwnError])
def test_a_user_error_is_one_paragraph_and_code_2(monkeypatch, capsys, kind):
    assert ending(monkeypatch, kind("graph.n = 3: too few")) == WRONG
    assert capsys.readouterr().err == "mpigossip: graph.n = 3: too few\n"


@pytest.mark.parametrize("kind", [WaitTimeoutError, NonFiniteError])
def test_a_failure_is_one_line_and_code_1(monkeypatch, capsys, kind):
    assert ending(monkeypatch, kind("rank 3 doesn't answer")) == FAILED
    assert capsys.readouterr().err == "mpigossip: rank 3 doesn't answer\n"


def test_only_the_first_process_prints_the_error(monkeypatch, capsys):
    assert ending(monkeypatch, LaunchError("no MPI", rank=1)) == WRONG
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", [ValueError, TimeoutError, ZeroDivisionError])
def test_other_errors_are_raised(monkeypatch, kind):
    with pytest.raises(kind):
        ending(monkeypatch, kind("a fault of the program"))
