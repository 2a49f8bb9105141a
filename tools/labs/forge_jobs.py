"""Test that each mutated job file is either a valid job or rejected with a message.

    python tools/labs/forge_jobs.py [--count 10000] [--steps 200] [--seed 0] [--files 500]
                                    [--minutes M]

In four of five cases, a job file of jobs/ is read with one to four random settings on the command
line; otherwise, random bytes of its text are changed. ``mpigossip simulate … --dry-run`` reads it
in a forked process. ``--steps`` of the valid jobs are then trained for ten steps. After that, one
file in each of ``--files`` folders of members is forged, and ``report``, ``replay`` or ``join``
reads the folder.

The following results are wrong: a traceback, a crash, an exit code other than 0, 1, 2 and 75, a
rejection without a message, and an import or a program that a file has requested. A dry run or
``report`` is slow if it takes more than 2 s of CPU time, or 200 MB more than before the fork. Wrong
and slow cases are printed, and the exit code is 1 if anything is wrong. ``--minutes`` limits the
total time: half of it is for jobs, a quarter for training steps, and the rest for members.
"""

import argparse
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from importlib import import_module
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tools" / "labs")]

from forge import forked  # noqa: E402

from mpigossip.cli import main as mpigossip  # noqa: E402
from mpigossip.config.toml import show  # noqa: E402
from mpigossip.studies.seeds import settings as settings_of  # noqa: E402
from mpigossip.training import assemble  # noqa: E402

SECONDS = 2.0
MEGABYTES = 200.0
"""CPU time, and growth of the memory, above which a command is slow."""
LIMIT_S = 60
"""Seconds after which a command counts as hanging."""
JOBS = ("digits", "cifar10-lenet", "cifar10-resnet20", "gpt-10m", "imagenet-resnet50", "text-gpt")
VALUES = (
    "-1",
    "0",
    "1",
    "2",
    "3",
    "17",
    "1e9",
    "1e-320",
    "nan",
    "inf",
    "-0.0",
    "1000000000",
    "9223372036854775808",
    "true",
    "none",
    '""',
    '"x"',
    "[]",
    "[0]",
    "[1,2]",
    "[1000000,1]",
    "{}",
    '"forged_module:part"',
    '"os:system"',
    '"../../x"',
    '"file:/etc/passwd"',
    "0.5",
    '"\\u001b[31m"',
    '"' + "x" * 5000 + '"',
    "1979-05-27",
    "0x10",
    "=",
    "'",
    "[[",
)
NAMES = {
    "model.name": ("mlp", "lenet", "resnet20", "gpt", "point", "factors"),
    "data.source": ("digits", "synthetic", "quadratics", "logistic", "factorization", "none.h5"),
    "task.name": ("classification", "language-model", "quadratics", "logistic", "factorization"),
    "graph.name": ("ring", "complete", "exponential", "one-peer-exponential", "grid", "base-3"),
    "node.mixer": ("auto", "synchronous", "asynchronous"),
}
"""Settings on whose value it depends which other settings exist."""
FURTHER = (
    "model.hidden",
    "model.layers",
    "model.width",
    "model.heads",
    "data.dimension",
    "data.steps",
    "data.points",
    "data.height",
    "cadence.period",
    "cadence.fragments",
    "graph.lazy",
    "local.beta1",
    "schedule.milestones",
    "nothing.at_all",
)
LATE = (
    "analysis.dryrun",
    "analysis.report",
    "runs.start_and_resume",
    "runs.members.join",
    "runs.members.replay",
    "mixing.asynchronous",
    "studies.theory",
)
"""Modules that are imported before the first fork, so that forked processes need not do so."""


def mutate_job(draw: random.Random, folder: Path) -> list[str]:
    """Write a job file to ``folder``, and change its text or draw random settings.

    :return: arguments of a command: the path of the file, and settings "section.key=value"
    """
    text = (REPO / "jobs" / f"{draw.choice(JOBS)}.toml").read_text()
    path = folder / "job.toml"
    if draw.random() < 0.2:
        data = bytearray(text.encode())
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(3)] = bytes(draw.choices(range(256), k=draw.randrange(3)))
        path.write_bytes(data)
        return [str(path)]
    path.write_text(text)
    known = list(settings_of(show_job(text)))
    words = []
    for _ in range(draw.randrange(1, 5)):
        key = draw.choice([*known, *NAMES, *FURTHER])
        if key in NAMES and draw.random() < 0.7:
            value = draw.choice(NAMES[key])
        elif draw.random() < 0.3:
            value = show(draw.choice([1, 2, 3, 4, 8, 0.1, 0.01, True, False, 64]))
        else:
            value = draw.choice(VALUES)
        words.append(f"{key}={value}")
    return [str(path), *words]


_SHOWN: dict[str, str] = {}
"""Results of :func:`show_job`, by its argument."""


def show_job(text: str) -> str:
    """Return the text of a job file with all settings, including the defaults."""
    if text not in _SHOWN:
        import tomllib

        from mpigossip import config

        _SHOWN[text] = config.dump(assemble.load(tomllib.loads(text)))
    return _SHOWN[text]


def outcome(words: list[str], out: Path) -> tuple[object, float, float, list[str]]:
    """Run a command of mpigossip in this process, which must be a forked one.

    :param words: arguments of the command
    :param out: file for its standard output and standard error
    :return: exit code, or traceback of an exception; CPU seconds; growth of the peak memory in MiB;
        forbidden events: imports of a module that a forged job names, started programs and network
        connections
    """
    strays = list[str]()

    def hook(event: str, facts: tuple) -> None:
        if event == "import" and facts[0].partition(".")[0] in ("forged_module", "x"):
            strays.append(f"import {facts[0]}")
        elif event in ("os.system", "os.exec", "socket.connect"):
            strays.append(event)

    with out.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.addaudithook(hook)
    begin = time.process_time()
    try:
        code: object = mpigossip(words)
    except SystemExit as left:
        code = left.code
    except BaseException:
        code = traceback.format_exc()
    spent = time.process_time() - begin
    sys.stdout.flush()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return code, spent, grown, strays


def check(words: list[str], top: Path, limited: bool = True) -> tuple[str, str]:
    """Run a command of mpigossip in a forked process, and judge how it ends.

    :param words: words of the command after "mpigossip"
    :param top: folder for the file with its output
    :param limited: whether the limits of time and memory apply
    :return: "exit code CODE", "wrong" or "slow"; a text about the fault, "" if there is none
    """
    out = top / "out"
    result, _ = forked(lambda: outcome(words, out), LIMIT_S)
    text = out.read_bytes().decode(errors="replace")
    if isinstance(result, str):
        return "wrong", f"{result}: {text[-300:]}"
    code, spent, grown, strays = result
    # The command line comes from the user, and may request an import. A file may not.
    requested = any("forged_module" in word or "os:system" in word for word in words)
    if code not in (0, 1, 2, 75) or "Traceback" in text:
        return "wrong", f"exit code {code}: {text[-1500:]}"
    if code and len(text) < 20:
        return "wrong", f"exit code {code} without a message: {text}"
    if strays and not requested:
        return "wrong", f"forbidden events: {strays[:3]}"
    if limited and (spent > SECONDS or grown > MEGABYTES):
        return "slow", f"{spent:.1f} s, {grown:.0f} MB more than before the fork"
    return f"exit code {code}", ""


def forge_members(original: Path, folder: Path, draw: random.Random) -> str:
    """Copy the folder of a training of members, and forge one file of the copy.

    :param original: folder of the training
    :param folder: path of the copy
    :param draw: random numbers
    :return: path of the forged file in the folder, and the way in which it was forged
    """
    shutil.copytree(original, folder)
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    how = draw.choice(
        ["bytes", "bytes", "cut", "empty", "json", "removed", "folder", "link", "pipe"]
    )
    data = bytearray(path.read_bytes())
    path.unlink()
    if how == "bytes":
        for _ in range(draw.randrange(1, 5) if data else 0):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[: draw.randrange(len(data) or 1)])
    elif how == "empty":
        path.touch()
    elif how == "json":
        path.write_text(
            draw.choice(['{"a": 1}', "[]", "null", "1" * 5000, "[" * 5000, '"\\ud800"'])
        )
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to("/dev/zero")
    elif how == "pipe":
        os.mkfifo(path)
    return f"{path.relative_to(folder)}: {how}"


def main() -> int:
    """Forge jobs and folders, run the commands, and print the number of cases by result.

    :return: exit code, which is 1 if any result is wrong, otherwise 0
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="time limit of all cases together"
    )
    options = parser.parse_args()
    begin = time.monotonic()

    def late(share: float) -> bool:
        return time.monotonic() - begin > 60 * options.minutes * share

    draw = random.Random(options.seed)
    counts = Counter[str]()
    bad = 0
    for name in LATE:
        import_module(f"mpigossip.{name}")
    with tempfile.TemporaryDirectory(prefix="forge-jobs-") as folder:
        top = Path(folder)
        os.chdir(top)

        def count(kind: str, words: list[str], about: str = "", limited: bool = True) -> str:
            nonlocal bad
            result, fault = check(words, top, limited)
            counts[f"{kind}: {result}"] += 1
            if fault:
                bad += result == "wrong"
                print(f"{result.upper()} {about} {' '.join(words)[:600]}\n{fault}\n", flush=True)
            return result

        accepted = list[tuple[bytes, list[str]]]()
        for _ in range(options.count):
            if late(0.5):
                break
            job, *words = mutate_job(draw, top)
            nodes = str(draw.choice([1, 2, 3, 4, 8]))
            if count("dry run", ["simulate", job, "--nodes", nodes, "--dry-run", *words]) == (
                "exit code 0"
            ):
                accepted.append((Path(job).read_bytes(), words))
        for data, words in draw.sample(accepted, min(options.steps, len(accepted))):
            if late(0.75):
                break
            (top / "job.toml").write_bytes(data)
            limits = ["run.steps=10", "data.workers=0", f"run.output={top / 'run'}"]
            shutil.rmtree(top / "run", ignore_errors=True)
            count(
                "ten steps",
                ["simulate", "job.toml", "--nodes", "2", *words, *limits],
                limited=False,
            )
        if options.files:
            words = [
                "join",
                "members",
                str(REPO / "jobs/digits.toml"),
                "model.name=mlp",
                "algorithm.style=atc",
                "run.steps=2",
                "cadence.name=every",
                "cadence.period=1",
                "run.epochs=1",
                "data.samples=64",
            ]
            count("members", words, limited=False)
        for number in range(options.files if (top / "members").is_dir() else 0):
            if late(1):
                break
            change = forge_members(top / "members", top / "forged", draw)
            words = [
                ["report", "forged"],
                ["replay", "forged", "--rounds", "1:2"],
                ["join", "forged"],
            ][number % 3]
            count(f"members, {words[0]}", words, change, limited=words[0] == "report")
            shutil.rmtree(top / "forged")
        os.chdir("/")
    for line, number in sorted(counts.items()):
        print(f"{number:6}  {line}")
    print(f"seed {options.seed}: {bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
