"""Damaged job files and flags: each is rejected with a message, or accepted for what it says.

python tools/labs/fuzz.py [--count 500] [--seed 0] [--kinds job flags] [--keep DIR]

Each is loaded by a fork of this process: a hang, a crash, a traceback, a control character on the
terminal, and a job accepted with a number that no setting means are counted as wrong, and the file
is kept. Exit code 1 then. Job files go through `simulate --dry-run`, flags through that and through
`plan`, `graph` and `job`. Damaged checkpoints and data sets: forge.py --only damage.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tools" / "labs")]

from forge import forked  # noqa: E402

from mpigossip import cli, config  # noqa: E402
from mpigossip.algorithms import BUILDERS as ALGORITHMS  # noqa: E402
from mpigossip.algorithms import LOCALS  # noqa: E402
from mpigossip.algorithms.cadence import BUILDERS as CADENCES  # noqa: E402
from mpigossip.graphs import BUILDERS as GRAPHS  # noqa: E402
from mpigossip.training import assemble  # noqa: E402

LIMIT_S = 30  # seconds for one load
VALUES = [
    *("-1", "0", "nan", "inf", "1e400", "[]", "{}", "true", '""', "1979-05-27", "[1, [2]]"),
    *('"../../etc"', '"; touch HERE"', '"$(touch HERE)"', "9" * 20, "'\\u0000'"),
    *("1e-320", "1e308", "-1e-3", "2147483648", "0.5", "1", "3", '"\\u001b[31m"', '"\\u202ex"'),
    *('"os:system"', '"json:dumps"', '"file:/dev/zero"', "[1e400]", "{a = 1}", '"all"', "[2, 3]"),
]
NUMBERS = ("0", "1", "2", "3", "7", "0.5", "-0.0", "1e-9", "1e-16", "1e15", "1e12", "65536",
           "2147483648", "9007199254740993", "9223372036854775807", "[0]", "[0.5]",
           "[1, 2, 3, 4]")  # fmt: skip
"""Values that some setting takes."""
NAMES = ("name", "options", "further", "beta", "period", "momentum", "delay", "fragments", "hidden",
         "layers", "depth", "degree", "p", "seed", "lr", "steps", "classes", "rate")  # fmt: skip


PLAIN = ('"-1"', '"0"', '"nan"', '"inf"', '"9e99999"', '""', '"x"', '"1e-320"', '"1e15"',
         '"99999999999999999999"', '"\\u001b[31m"', '"--"', '"a b"', '"\\u0000"')  # fmt: skip


def damaged_job(text: str, draw: random.Random) -> bytes:
    """Lines doubled, swapped, left out, given another value; or bits flipped, or an end cut off."""
    how, lines = draw.randrange(6), text.splitlines()
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    if how == 0:
        data = bytearray(text.encode())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)
    if how == 1:
        return text.encode()[: draw.randrange(len(text))]
    if how == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif how == 3:
        lines.insert(other, lines[at])
    elif how == 4:
        del lines[at]
    else:
        lines[at] = f"{lines[at].partition('=')[0] or 'x'} = {draw.choice(VALUES)}"
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


LOADS = {"job": load_job, "flags": load_flags}


def main() -> int:
    """Damage, load, count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=LOADS, default=[*LOADS])
    parser.add_argument("--keep", type=Path, help="folder for the files that went wrong")
    options = parser.parse_args()
    draw, wrong = random.Random(options.seed), 0
    jobs = sorted((REPO / "jobs").glob("*.toml"))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for kind in options.kinds:
            found = Counter[str]()
            for number in range(options.count):
                path = Path(folder) / f"{kind}-{number}.toml"
                if kind == "job":
                    path.write_bytes(damaged_job(draw.choice(jobs).read_text("utf-8"), draw))
                else:
                    path.write_text(json.dumps(damaged_words(draw)), "utf-8")
                answer, _ = forked(lambda: LOADS[kind](path), LIMIT_S)  # noqa: B023
                found[answer] += 1
                if answer in ("none", "refused"):
                    continue
                wrong += 1
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    path.rename(options.keep / path.name)
            print(f"{options.count} x {kind}: {dict(found)}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
