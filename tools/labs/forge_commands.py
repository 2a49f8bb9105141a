"""Test the commands that read logs and checkpoints with forged files.

    python tools/labs/forge_commands.py [--count 1000] [--seed 0] [--keep DIR]
    python tools/labs/forge_commands.py --ranks --count 40

The second command resumes forged checkpoints on 1, 3 or 4 ranks. Files are changed as by
tools/labs/forge.py. In addition, texts inside the files are changed, with correct checksums: job,
environment, summary, counters, facts.

Each case is a run directory whose log or newest checkpoint is forged; in about half of the cases,
there is no other checkpoint. A forged log is read by `log show` and `log export`; each of `log
plot`, `report` and `resume --simulate` reads about one of five forged logs. A forged checkpoint is
read by `checkpoint show|verify|export`, `resume --simulate` and `simulate` of the job.

The following results are wrong, and are printed: a traceback, a hang, an exit code other than 0, 1,
2 and 75, a failure without a message, an import that the forged file requests from a command that
does not train, a file opened in the folder to which forged links refer, and a training that begins
at step 0 although there is a checkpoint. Crashes of the HDF5 library, which `mpigossip` converts to
a message, and control characters in the output are counted, but are not wrong. The exit code is 1
if any result is wrong. Ranks are started by MPIGOSSIP_MPIEXEC, as in the tests.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from importlib import import_module
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tools" / "labs")]

import h5py  # noqa: E402
import numpy as np  # noqa: E402
from forge import Forger, Watch, forked, outside  # noqa: E402

from mpigossip.cli import main as mpigossip  # noqa: E402
from mpigossip.runs.run import Run  # noqa: E402
from mpigossip.store import checkpoint, guard  # noqa: E402
from mpigossip.store import manifest as manifests  # noqa: E402
from mpigossip.store.hdf5 import fixed  # noqa: E402
from tests import launch  # noqa: E402

LIMIT_S = 120
RANKS_S = 40.0
"""Seconds after which a command with ranks counts as hanging."""
CRASH = re.compile("crash -(4|6|7|8|11)")
"""Regular expression for exits by a signal that the processor or abort() has sent."""
LATE = ("analysis.report", "runs.start_and_resume", "runs.model_export", "store.log_export")
"""Modules that are imported before the first fork, so that forked processes need not do so."""
JOB = [
    "jobs/digits.toml",
    "--nodes",
    "2",
    "model.name=mlp",
    "model.hidden=[4]",
    "data.batch=8",
    "data.workers=0",
    "checkpoint.every_steps=1",
    "checkpoint.keep=9",
    "run.steps=5",
    "run.evaluate_every=1",
]
VALUES = (
    None,
    -1,
    0,
    1 << 62,
    1 << 70,
    0.5,
    float("nan"),
    float("inf"),
    True,
    "",
    "x",
    "\x1b[31mred",
    "\x9b2J",
    "\u202etxt",
    "a\rb",
    [],
    {},
    [1, "x"],
    {"a": {"b": []}},
    "forged_module:part",
    "os:system",
    "../../x",
    "x" * 100_000,
)


class Texts(Forger):
    """Forger that can also change the texts and JSON values inside logs and checkpoints."""

    def texts(self) -> str:
        """Change a setting of the job, or a value of a log's or checkpoint's JSON texts."""
        return self._log() if self.kind == "log" else self._checkpoint()

    def _table(self, table: dict) -> str:
        """Change, add or remove a value of ``table`` in place; return a text about the change."""
        key = self.draw.choice([*table, "further"])
        value = self.draw.choice(VALUES)
        if self.draw.random() < 0.2:
            table.pop(key, None)
            return f"without {key}"
        table[key] = value
        return f"{key} = {repr(value)[:30]}"

    def _job(self, text: str) -> tuple[str, str]:
        """Change the value in one line of a job file.

        :param text: text of the job file
        :return: the new text, and the changed line
        """
        lines = text.splitlines()
        index = self.draw.choice([k for k, line in enumerate(lines) if " = " in line])
        value = self.draw.choice(VALUES)
        text_of_value = json.dumps(value) if not isinstance(value, float | dict) else str(value)
        lines[index] = f"{lines[index].partition(' = ')[0]} = {text_of_value}"
        return "\n".join(lines) + "\n", lines[index][:60]

    def _checkpoint(self) -> str:
        """Change the job, a fact or a counter of a checkpoint; return a text about the change."""
        manifest = checkpoint.read_manifest(self.folder)
        which = self.draw.choice(["job", "meta", "numbers", "numbers"])
        job = manifest.job
        meta = dict(manifest.meta)
        if which == "job":
            job, change = self._job(job)
        elif which == "meta":
            change = self._table(meta)
        else:
            with h5py.File(self.path, "r+") as file:
                numbers = json.loads(file["numbers"][()])
                change = self._table(numbers)
                del file["numbers"]
                file.create_dataset("numbers", data=fixed(json.dumps(numbers)))
        changed = checkpoint.Manifest(3, 2, job, meta, manifest.entries)
        manifests.write(self.folder / checkpoint.MANIFEST, changed)
        self.sign()
        return f"{which}: {change}"

    def _log(self) -> str:
        """Change the job, the environment or the summary of a log; return a text about it."""
        which = self.draw.choice(["job", "environment", "summary", "summary"])
        with h5py.File(self.path, "r+") as file:
            thing = file["summary"] if which == "summary" else file
            if which == "summary":
                table = dict(thing.attrs)
                change = self._table(table)
                for key in set(thing.attrs) - set(table):
                    del thing.attrs[key]
                value = table.get(change.partition(" = ")[0], 0)
                value = fixed(value) if isinstance(value, str) else value
                value = np.bytes_(json.dumps(value)) if isinstance(value, dict | list) else value
                value = h5py.Empty("f4") if value is None else value
                with contextlib.suppress(TypeError, OverflowError):
                    if " = " in change:
                        thing.attrs[change.partition(" = ")[0]] = value
            elif which == "environment":
                table = json.loads(bytes(file.attrs["environment"]))
                change = self._table(table)
                text = json.dumps(table if self.draw.random() < 0.7 else self.draw.choice(VALUES))
                file.attrs["environment"] = fixed(text)
            else:
                text, change = self._job(bytes(file.attrs["job"]).decode())
                file.attrs["job"] = fixed(text)
            with contextlib.suppress(ValueError):
                guard.seal(thing)
        return f"{which}: {change}"


def run_command(words: list[str], out: Path) -> tuple[object, list[str], list[str]]:
    """Run a command of mpigossip in this process, which must be a forked one.

    :param words: words of the command after "mpigossip"
    :param out: file to which the output of the command is written
    :return: exit code or traceback; forbidden events: imports that a forged file requests, started
        programs and network connections; checkpoints from which the command has resumed
    """
    strays = list[str]()
    resumed = list[str]()
    real = Run.resume

    def resume(run: Run):
        resumed.append(str(run.newest))
        return real(run)

    def hook(event: str, facts: tuple) -> None:
        if event == "import" and facts[0].partition(".")[0] in ("forged_module", "x"):
            strays.append(f"import {facts[0]}")
        elif event in ("os.system", "os.exec", "socket.connect"):
            strays.append(event)

    Run.resume = resume
    with out.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.addaudithook(hook)
    try:
        code: object = mpigossip(words)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        code = traceback.format_exc()
    result = code, [*strays], [*resumed]
    sys.stdout.flush()
    return result


def commands(kind: str, run: Path, out: Path) -> list[list[str]]:
    """Return the words of the commands that read the forged file.

    :param kind: kind of the forged file: "log" or "checkpoint"
    :param run: the run directory
    :param out: folder for files that the commands write
    """
    path = str(run)
    if kind == "log":
        return [
            ["log", "show", path],
            ["log", "export", path, "--csv", str(out / "a.csv")],
            ["log", "plot", path, "--out", str(out / "a.png")],
            ["report", path, "--html", str(out / "a.html")],
            ["resume", path, "--simulate"],
        ]
    return [
        ["checkpoint", "show", path],
        ["checkpoint", "verify", path],
        ["checkpoint", "export", path, "--out", str(out / "a.safetensors")],
        ["resume", path, "--simulate"],
        ["simulate", *JOB, f"run.output={run}"],
    ]


def copy_or_link(source: str, to: str) -> None:
    """Copy a regular file; make a hard link to anything else, such as a pipe."""
    if Path(source).is_file():
        shutil.copy2(source, to, follow_symlinks=False)
    else:
        os.link(source, to)


def on_ranks(run: Path, ranks: int) -> str:
    """Resume a forged run under the launcher, and check how the command ends.

    :param run: the run directory
    :param ranks: number of ranks
    :return: text about a wrong result; "" if the result is not wrong
    """
    run_on_ranks = launch.Launch(ranks, ["mpigossip", "resume", str(run), "run.steps=6"], REPO)
    with contextlib.closing(run_on_ranks), contextlib.suppress(subprocess.TimeoutExpired):
        code = run_on_ranks.process.wait(RANKS_S)
        err = run_on_ranks.output()[1]
        well = (not code or "mpigossip: " in err) and "Traceback" not in err
        return "" if well else f"exit code {code}: {err[-900:]}"
    return f"the command did not end within {RANKS_S} s: {run_on_ranks.output()[1][-900:]}"


def describe_problem(words: list[str], result: object, text: str) -> str:
    """Describe the wrong result of a command; return "" if the result is not wrong.

    :param words: words of the command
    :param result: result of :func:`run_command`, or "hang" or "crash CODE" from `forked`
    :param text: output of the command
    """
    # A crash of HDF5 is not wrong: `mpigossip` runs such commands in a child process.
    if isinstance(result, str):
        return "" if CRASH.fullmatch(result) else result
    code, strays, resumed = result
    trains = words[0] in ("resume", "simulate")
    if code not in (0, 1, 2, 75) or "Traceback" in text:
        return f"exit code {code}: {text[-500:]}"
    if code and len(text) < 20:
        return f"exit code {code} without a message: {text}"
    if strays and not trains:
        return f"forbidden events: {strays[:3]}"
    return "the training begins at step 0" if trains and code == 0 and not resumed else ""


def forge(run: Path, kind: str, top: Path, draw: random.Random) -> tuple[str, str]:
    """Forge the log or the newest checkpoint of a run.

    :param run: the run directory
    :param kind: file to forge: "log" or "checkpoint"
    :param top: folder for temporary files, with the folder "outside"
    :param draw: random numbers
    :return: name of the method of `Texts`; description of the change, "" if it was impossible
    """
    folder = checkpoint.folder(run, 3)
    # Move the log to a separate folder, so that nothing else of the run is changed.
    if kind == "log":
        folder = top / "alone"
        folder.mkdir()
        (run / "log.h5").rename(folder / "log.h5")
    forger = Texts(kind, folder, top / "outside", draw)
    ways = [forger.structure] * 4 + [forger.texts] * 6
    ways += [forger.place, forger.damage, forger.damage, forger.header]
    ways += [forger.manifest] * 2 if kind == "checkpoint" else [forger.journal]
    way = draw.choice(ways)
    change = ""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RuntimeError):
        change = way()
    if kind == "log":
        for file in folder.iterdir():
            file.rename(run / file.name)
        folder.rmdir()
    return way.__name__, change


def check_commands(kind: str, run: Path, watch: Watch, top: Path, draw: random.Random):
    """Run the commands that read a forged file, and yield their results.

    :param kind: kind of the forged file: "log" or "checkpoint"
    :param run: the run directory
    :param watch: watch of a folder whose files must not be opened
    :param top: folder for temporary files
    :param draw: random numbers
    :return: for each command: its name; its exit code, "wrong" or "crash CODE"; a text about the
        wrong result, "" if it is not wrong
    """
    all_words = commands(kind, run, top / "files")
    if kind == "log":  # These commands take seconds, so run few of them.
        all_words = all_words[:2] + [words for words in all_words[2:] if draw.random() < 0.2]
    for words in all_words:
        if words[0] == "resume":
            shutil.rmtree(top / "again", ignore_errors=True)
            shutil.copytree(run, top / "again", symlinks=True, copy_function=copy_or_link)
            words = [word.replace(str(run), str(top / "again")) for word in words]
        watch.seen()
        out = top / "out"
        result, _ = forked(lambda: run_command(words, out), LIMIT_S)  # noqa: B023
        text = out.read_bytes().decode(errors="replace")
        problem = describe_problem(words, result, text)
        if watch.seen():
            problem = problem or "the command opened a file to which a forged link refers"
        name = " ".join(words[:2]) if words[0] in ("log", "checkpoint") else words[0]
        controls = re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
        outcome = "wrong" if problem else result if isinstance(result, str) else result[0]
        yield name, f"{outcome}{', control characters' if controls else ''}", problem


def main() -> int:
    """Forge files, run all commands, print the number of cases by result; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for copies of the wrong cases")
    parser.add_argument("--ranks", action="store_true", help="resume checkpoints on ranks instead")
    options = parser.parse_args()
    os.chdir(REPO)
    draw = random.Random(options.seed)
    outcomes = Counter[str]()
    bad = 0
    done = 0
    for name in LATE:
        import_module(f"mpigossip.{name}")
    with tempfile.TemporaryDirectory(prefix="forge-commands-") as folder:
        top = Path(folder)
        watch = Watch(outside(top))
        run = top / "run"
        original = top / "original"
        words = ["simulate", *JOB, f"run.output={run}"]
        result, _ = forked(lambda: run_command(words, top / "out"), 300)
        assert result[0] == 0, (top / "out").read_text()
        for step in (1, 4, 5):
            shutil.rmtree(checkpoint.folder(run, step))
        (top / "files").mkdir()
        run.rename(original)
        for number in range(options.count):
            shutil.copytree(original, run)
            kind = "checkpoint" if options.ranks else ("log", "checkpoint")[number % 2]
            if draw.random() < 0.5:
                shutil.rmtree(checkpoint.folder(run, 2))
            method, change = forge(run, kind, top, draw)
            done += bool(change)
            results = check_commands(kind, run, watch, top, draw) if change else ()
            if change and options.ranks:
                ranks = draw.choice([1, 3, 3, 4])
                problem = on_ranks(run, ranks)
                results = [(f"resume on {ranks} ranks", "wrong" if problem else "good", problem)]
            for name, outcome, problem in results:
                outcomes[f"{kind}, {name}: {outcome}"] += 1
                if problem:
                    bad += 1
                    print(
                        f"WRONG {number} {kind}, {method} {change}, {name}:\n{problem[-1500:]}\n",
                        flush=True,
                    )
                    if options.keep:
                        copy = options.keep / f"{options.seed}-{number}"
                        shutil.copytree(run, copy, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(run)
    for line, count in sorted(outcomes.items()):
        print(f"{count:5}  {line}")
    print(f"{done} forged, {bad} wrong")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
