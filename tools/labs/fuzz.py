"""Damaged job files, flags, checkpoints and data sets: each is rejected, or loads as it was.

python tools/labs/fuzz.py [--count 500] [--seed 0] [--kinds job flags checkpoint "data set"]

Each is loaded in a child process under a deadline: a hang, a crash, a traceback of Python, a
control character on the terminal, a job accepted with a number that no setting means, and numbers
that differ from those written are counted as wrong, and the file is kept. Exit code 1 then. Job
files go through `simulate --dry-run`, flags through that and through `plan`, `graph` and `job`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from mpigossip import cli, config  # noqa: E402
from mpigossip.algorithms import BUILDERS as ALGORITHMS  # noqa: E402
from mpigossip.algorithms import LOCALS  # noqa: E402
from mpigossip.algorithms.cadence import BUILDERS as CADENCES  # noqa: E402
from mpigossip.cluster.ranks import Alone  # noqa: E402
from mpigossip.config import JobError  # noqa: E402
from mpigossip.graphs import BUILDERS as GRAPHS  # noqa: E402
from mpigossip.graphs import GraphError  # noqa: E402
from mpigossip.store import StoreError, checkpoint  # noqa: E402
from mpigossip.store.dataset import open_dataset, pack  # noqa: E402
from mpigossip.training import assemble  # noqa: E402

LIMIT_S = 30.0  # seconds for one load
VALUES = [
    *("-1", "0", "nan", "inf", "1e400", "[]", "{}", "true", '""', "1979-05-27", "[1, [2]]"),
    *('"../../etc"', '"; touch HERE"', '"$(touch HERE)"', "9" * 20, "'\\u0000'"),
    *("1e-320", "1e308", "-1e-3", "2147483648", "0.5", "1", "3", '"\\u001b[31m"', '"\\u202ex"'),
    *('"os:system"', '"json:dumps"', '"file:/dev/zero"', "[1e400]", "{a = 1}", '"all"', "[2, 3]"),
]
NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "7",
    "0.5",
    "-0.0",
    "1e-9",
    "1e-16",
    "1e15",
    "65536",
    "2147483648",
    "9007199254740993",
    "9223372036854775807",
    "1e12",
    "[0]",
    "[0.5]",
    "[1, 2, 3, 4]",
)
"""Values that some setting takes."""
NAMES = ("name", "options", "further", "beta", "period", "momentum", "delay", "fragments", "hidden",
         "layers", "depth", "degree", "p", "seed", "lr", "steps", "classes", "rate")  # fmt: skip


PLAIN = ('"-1"', '"0"', '"nan"', '"inf"', '"9e99999"', '""', '"x"', '"1e-320"', '"1e15"',
         '"99999999999999999999"', '"\\u001b[31m"', '"--"', '"a b"', '"\\u0000"')  # fmt: skip


# -- damage ---------------------------------------------------------------------------------------


def damage(data: bytes, draw: random.Random) -> bytes:
    """Some bits flipped, or a stretch cut off, zeroed, swapped with another, put in twice."""
    out = bytearray(data)
    at, other = sorted(draw.sample(range(len(out)), 2))
    length = min(draw.choice([1, 8, 64, 512]), other - at)
    how = draw.randrange(6)
    if how <= 1:
        for _ in range(draw.choice([1, 1, 2, 8])):
            out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
    elif how == 2:
        del out[other:]
    elif how == 3:
        out[at : at + length] = bytes(length)
    elif how == 4:
        first, second = out[at : at + length], out[other : other + length]
        out[at : at + len(second)], out[other : other + len(first)] = second, first[: len(second)]
    else:
        out[other:other] = out[at : at + length]
    return bytes(out)


def damaged_job(text: str, draw: random.Random) -> bytes:
    """Lines doubled, swapped, left out, given another value; or damaged as bytes."""
    how = draw.randrange(5)
    if how == 0:
        return damage(text.encode(), draw)
    lines = text.splitlines()
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    if how == 1:
        lines[at], lines[other] = lines[other], lines[at]
    elif how == 2:
        lines.insert(other, lines[at])
    elif how == 3:
        del lines[at]
    else:
        key = lines[at].partition("=")[0]
        lines[at] = f"{key or 'x'} = {draw.choice(VALUES)}"
    return "\n".join(lines).encode()


def damaged_words(draw: random.Random) -> list[str]:
    """A command with damaged settings and flags."""
    job = str(REPO / "jobs" / f"{draw.choice(['digits', 'gpt-10m', 'cifar10-lenet'])}.toml")
    sections = {f.name: [k.name for k in fields(f.default_factory)] for f in fields(config.Job)}
    settings = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        section = draw.choice([*sections])
        key = draw.choice([*sections[section], draw.choice(NAMES)])
        known = {"algorithm": ALGORITHMS, "graph": GRAPHS, "cadence": CADENCES, "local": LOCALS}
        if section in known and draw.random() < 0.5:
            settings.append(f"{section}.name={draw.choice([*known[section]])}")
        settings.append(f"{section}.{key}={draw.choice(draw.choice([VALUES, NUMBERS, NUMBERS]))}")

    def value(right: str) -> str:
        return right if draw.random() < 0.93 else json.loads(f"[{draw.choice(PLAIN)}]")[0]

    nodes = ["--nodes", value(draw.choice(["1", "2", "4", "9", "12"]))]
    how = draw.randrange(8)
    if how <= 4:
        return ["simulate", job, *nodes, "--dry-run", *settings]
    if how == 5:
        rates = {"compute": "1ms", "node": "1us", "latency": "1us", "bandwidth": "1GB/s",
                 "sum": "9GB/s", "coding": "9GB/s", "jitter": "5%", "period": "4"}  # fmt: skip
        flags = [word for name, right in rates.items() for word in (f"--{name}", value(right))]
        return ["plan", job, *nodes, "--seconds", "0", *flags, *settings]
    if how == 6:
        flags = ["--seed", value("1"), *(["--weights", value("laplacian")] * draw.randrange(2))]
        named = [f"{draw.choice(NAMES)}={draw.choice(VALUES)}"] * draw.randrange(2)
        return ["graph", "show", value(draw.choice([*GRAPHS])), *nodes, *flags, *named]
    return ["job", value("perlmutter"), job, *nodes, "--time", value("30m"), "--launcher",
            value("srun"), "--venv", value("/tmp"), "--account", value("a"), *settings]  # fmt: skip


def damage_checkpoint(folder: Path, draw: random.Random) -> None:
    """One file damaged, missing, or in another's place."""
    files = sorted(folder.iterdir())
    one, other = draw.sample(files, 2)
    how = draw.randrange(8)
    if how == 0:
        one.unlink()
    elif how == 1:
        one.rename(folder / "x")
        other.rename(one)
        (folder / "x").rename(other)
    else:
        one.write_bytes(damage(one.read_bytes(), draw))


# -- loading, in a child --------------------------------------------------------------------------


def load_job(path: Path) -> str:
    """Check a job; the words "none" where it is one, as mutated jobs may differ."""
    said = load_words(["simulate", str(path), "--nodes", "4", "--dry-run"])
    if said != "none":
        return said
    job = assemble.load(path)
    return "none" if config.load(config.dump(job)) == job else "a job that isn't what it dumps"


def load_flags(path: Path) -> str:
    """Run the command that is in the file."""
    return load_words(json.loads(path.read_text("utf-8")))


def load_words(words: list[str]) -> str:
    """Run a command: "none" where it has nothing against its words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as left:
            code = left.code
    told = out.getvalue() + err.getvalue()
    if re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", told):
        return "an escape"
    if code == 2 and re.search("mpigossip: .{10}|error: .{10}", err.getvalue()):
        return "refused"
    if code:
        return f"exit code {code}: {err.getvalue()[-200:]}".replace("\n", " ")
    if words[0] in ("simulate", "job", "plan"):
        at = next(k for k, word in enumerate(words) if word.endswith(".toml") or "/job-" in word)
        settings = [word for word in words[at + 1 :] if re.match(r"\w+\.\w+=", word)]
        odd = [*nonsense(asdict(assemble.load(Path(words[at]), settings)))]
        return f"accepted: {odd[0]}" if odd else "none"
    return "none"


def nonsense(value: object, name: str = "") -> Iterator[str]:
    """Numbers that no setting means."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from nonsense(below, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for below in value:
            yield from nonsense(below, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        size = abs(value)
        large = size > 1e16 and not name.endswith("seed")
        small = 0 < size < 1e-16 and not name.startswith(".faults")  # chances
        if not math.isfinite(size) or value < 0 or large or small:
            yield f"{name} = {value}"


def load_checkpoint(path: Path) -> str:
    """All of a checkpoint as a hash."""
    manifest, sha = checkpoint.read_manifest(path), hashlib.sha256()
    sha.update(repr((manifest.step, manifest.n, manifest.job, manifest.meta)).encode())
    for node in range(manifest.n):
        state = checkpoint.read_node(path, node)
        sha.update(repr((state.names, state.shapes, state.numbers, sorted(state.arrays))).encode())
        sha.update(state.parameters.tobytes())
        for name in sorted(state.arrays):
            sha.update(state.arrays[name].tobytes())
    return sha.hexdigest()


def load_dataset(path: Path) -> str:
    """All of a data set as a hash."""
    sha = hashlib.sha256()
    with open_dataset(path) as data:
        facts = (data.kind, data.classes, data.channels, data.scale, data.mean, data.std)
        sha.update(repr((*facts, sorted(data.attributes.items()))).encode())
        for split in (data.train, data.test):
            sha.update(split.labels.tobytes() + split.sizes.tobytes())
            for index in range(len(split)):
                sha.update(split.encoded(index))
    return sha.hexdigest()


LOADS: dict[str, Callable[[Path], str]] = {
    "job": load_job,
    "flags": load_flags,
    "checkpoint": load_checkpoint,
    "data set": load_dataset,
}


def child() -> None:
    """Answer each line "KIND<tab>PATH" with what the load gave; die of anything unforeseen."""
    for line in sys.stdin:
        kind, path = line.rstrip("\n").split("\t")
        try:
            answer = LOADS[kind](Path(path))
        except (JobError, GraphError, StoreError) as error:
            answer = "refused" if str(error) else "refused without a word"
        print(answer, flush=True)


class Child:
    """A process that loads; a new one after a hang or a crash."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def ask(self, kind: str, path: Path) -> str:
        """What the load gave; "hang", or "crash" with the last line of its error."""
        if self.process is None:
            words = [sys.executable, __file__, "--child"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self.process = subprocess.Popen(words, text=True, **pipes)
        process = self.process
        process.stdin.write(f"{kind}\t{path}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], LIMIT_S)
        answer = process.stdout.readline().strip() if ready else "hang"
        if ready and answer:
            return answer
        self.close()
        last = (process.stderr.read().strip().splitlines() or [""])[-1]
        return answer or f"crash {process.returncode}: {last}"

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


# -- the series -----------------------------------------------------------------------------------


def originals(top: Path) -> dict[str, Path]:
    """A whole checkpoint and data set, made here."""
    from mpigossip.runs import launch

    settings = ["model.name=mlp", "model.hidden=[16]", "data.batch=8", "run.steps=2"]
    with contextlib.redirect_stdout(io.StringIO()):
        launch.train(assemble.load({}, [*settings, f"run.output={top / 'run'}"]), Alone(), 3)
    draw = np.random.default_rng(0)
    for split, name in ((s, n) for s in ("train", "test") for n in ("ape", "bee")):
        place = top / "images" / split / name
        place.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(draw.integers(0, 256, (9, 9, 3), np.uint8)).save(
                place / f"{number}.png"
            )
    pack(top / "images", top / "whole.h5")
    return {"checkpoint": checkpoint.latest(top / "run"), "data set": top / "whole.h5"}


def mutant(kind: str, whole: Path, top: Path, number: int, draw: random.Random) -> Path:
    """A damaged copy."""
    path = top / f"{kind.replace(' ', '-')}-{number}"
    if kind == "job":
        path.write_bytes(damaged_job(whole.read_text("utf-8"), draw))
    elif kind == "flags":
        path.write_text(json.dumps(damaged_words(draw)), "utf-8")
    elif kind == "data set":
        path.write_bytes(damage(whole.read_bytes(), draw))
    else:
        shutil.copytree(whole, path)
        damage_checkpoint(path, draw)
    return path


def main() -> int:
    """Damage, load, count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=LOADS, default=[*LOADS])
    parser.add_argument("--keep", type=Path, help="folder for the files that went wrong")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return 0
    draw, one, wrong = random.Random(options.seed), Child(), 0
    jobs = sorted((REPO / "jobs").glob("*.toml"))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        top = Path(folder)
        made = originals(top)
        for kind in options.kinds:
            found: Counter[str] = Counter()
            right = LOADS[kind](made[kind]) if kind in made else "none"
            for number in range(options.count):
                whole = made[kind] if kind in made else draw.choice(jobs)
                path = mutant(kind, whole, top, number, draw)
                answer = one.ask(kind, path)
                good = answer in (right, "refused")
                found[
                    ("loads as it was" if answer == right else "refused") if good else answer
                ] += 1
                wrong += not good
                if options.keep and not good:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    path.rename(options.keep / path.name)
            print(f"{options.count} x {kind}: {dict(found)}", flush=True)
        one.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
