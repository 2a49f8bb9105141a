"""Fixtures for all tests: `ranks` (functions on MPI ranks), `pooled` and `mpirun` (commands)."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import cases, launch, rankpool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="every combination: also tests marked every"
    )
    parser.addoption(
        "--both",
        action="store_true",
        help="what may differ between MPIs: tests marked both, without --all their last cases",
    )


started: Counter[str] = Counter()
"""Processes that the tests of this session started, by kind."""


def _count(event: str, args: tuple) -> None:
    if event == "subprocess.Popen" and args[1]:
        command = shlex.join(map(os.fsdecode, [args[1]] if isinstance(args[1], str) else args[1]))
        first, ranks, _ = command.partition(" -n ")
        mpi = ranks and "mpiexec" in first  # not: mpiexec --version
        fork = "warmstub.py" in command or f"{os.sep}warm-" in command
        started[
            "mpirun" if mpi else "fork" if fork else "python" if "python" in command else ""
        ] += 1


sys.addaudithook(_count)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's count to the session that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["started"] = dict(started)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    started.update(getattr(node, "workeroutput", {}).get("started", {}))


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the number of started processes: launches of MPI take most of the time of all tests."""
    if started:
        terminalreporter.write_line(
            f"started: {started['mpirun']} times mpirun, {started['fork']} forks of a process "
            f"that has torch, {started['python']} new processes of Python"
        )


def pytest_configure() -> None:
    """Let SIGTERM, from `timeout` or a scheduler, end the session like Ctrl-C, after fixtures.

    Processes of tests receive Ctrl-C, too; a shell makes its background processes ignore it.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test for --both: importing them takes longer than some tests."""
    if config.option.both and collection_path.name.startswith("test_"):
        return "mark.both" not in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need an MPI launcher; deselect tests that `--all` or `--both` doesn't run."""
    for item in items:
        used = set(getattr(item, "fixturenames", ()))
        if {"ranks", "mpirun", "mpistart"} & used:
            item.add_marker("mpi")
        if {"mpirun", "mpistart"} & used:
            item.add_marker("launcher")
    chosen = items[:]
    if not config.option.all:
        chosen = [item for item in chosen if not item.get_closest_marker("every")]
    if config.option.both:
        chosen = [i for i in chosen if i.get_closest_marker("both") and i.get_closest_marker("mpi")]
    if config.option.both and not config.option.all:
        chosen = list({item.nodeid.partition("[")[0]: item for item in chosen}.values())
    config.hook.pytest_deselected(items=[*{*items} - {*chosen}])
    items[:] = chosen


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report to tools/test.sh which tests failed, and whether they start a launcher themselves."""
    path = os.environ.get("MPIGOSSIP_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(path).open("a") as file:
            print(
                "launcher" if "launcher" in report.keywords else "other", report.nodeid, file=file
            )


@pytest.fixture(scope="session")
def ranks() -> Iterator[rankpool.Ranks]:
    """Return `ranks`: `ranks(n)(function, *args, timeout=60)` calls a function on n MPI ranks.

    The result is a list of the n results of `function(comm, *args)`.

    The function is at the top level of a module and imports MPI inside; arguments and results are
    pickled. A rank that raises, dies or does not answer fails the test with its traceback.
    """
    launch.launcher()  # skips where there is none
    pools = rankpool.Ranks()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def mpirun() -> Callable:
    """Return `mpirun(n, args, timeout=60, cwd=None, env=None)`, which runs a command on n ranks.

    The result is a CompletedProcess with text output.

    n = 0 runs the command without a launcher. Processes that outlive it fail the test.
    """
    launch.launcher()
    return launch.mpirun


@pytest.fixture
def warm(monkeypatch) -> None:
    """Start Python processes of test and package as forks that have imported torch already."""
    monkeypatch.setattr(sys, "executable", launch.warm_python())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one torch thread in this process, so that its sums equal the sums of ranks."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone(tmp_path, monkeypatch, capfd, one_thread) -> Callable:
    """Return `alone(*words)`, which runs `mpigossip …` in this process and the folder `tmp_path`.

    The result has the exit code, stdout and stderr.
    """
    from mpigossip import cli

    monkeypatch.chdir(tmp_path)

    def run(*words) -> subprocess.CompletedProcess:
        capfd.readouterr()
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as ended:
            code = ended.code
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run


@pytest.fixture
def pooled(ranks, tmp_path) -> Callable:
    """Return `pooled(n, *words, timeout=60)`, which runs `mpigossip …` on n ranks of a pool.

    It runs in the folder `tmp_path`, and its result has the form of the result of `alone`.

    It can also run a program (`x.py …`). It replaces `mpirun` in tests that don't test the launch.
    """

    def run(n: int, *words, timeout: float = 60) -> subprocess.CompletedProcess:
        words = [str(word) for word in words]
        results = ranks(n)(cases.command, str(tmp_path), words, timeout=timeout)
        codes, out, err = zip(*results, strict=True)
        code = next(filter(None, codes), 0)
        return subprocess.CompletedProcess(words, code, "".join(out), "".join(err))

    return run


@pytest.fixture
def mpistart() -> Iterator[Callable[..., launch.Launch]]:
    """Return `mpistart(n, args, cwd=None, env=None, warm=False)`, which starts n ranks.

    The result is a running `Launch`, which the test can signal or kill.

    It has `.ranks()` (process ids), `.process`, `.output()` and `.finish(timeout)`.
    """
    launch.launcher()
    started: list[launch.Launch] = []

    def start(*args, **kwargs) -> launch.Launch:
        started.append(launch.Launch(*args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.close()
