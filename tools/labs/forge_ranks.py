"""Forged checkpoints resumed on real ranks, also of another number: refused in words, no hang.

python tools/labs/forge_ranks.py [--count 40] [--seed 0] [--seconds 400]

Forged as by tools/labs/forge.py; the launcher is MPIGOSSIP_MPIEXEC, as in the tests. A traceback,
no end within 40 s, an end without a line of ours, and a run that goes on from a forged structure
are counted as wrong; exit code 1 then.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tools" / "labs")]

import h5py  # noqa: E402
import numpy as np  # noqa: E402
from forge import Forger  # noqa: E402

from mpigossip.store import checkpoint  # noqa: E402
from tests import launch  # noqa: E402

LIMIT_S = 40.0
SETTINGS = ["model.name=mlp", "model.hidden=[4]", "data.batch=8", "data.workers=0", "run.steps=4",
            "node.timeout_s=15"]  # fmt: skip


def resumed(run: Path, ranks: int) -> tuple[int | None, str]:
    """Exit code, None for a hang, and what came on stderr."""
    made = launch.Launch(ranks, ["mpigossip", "resume", str(run), "run.steps=6"], REPO)
    try:
        return made.process.wait(LIMIT_S), made.output()[1]
    except subprocess.TimeoutExpired:
        return None, made.output()[1]
    finally:
        made.close()


def main() -> int:
    """Forge, resume, count."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new run after that")
    options = parser.parse_args()
    draw, found, wrong = random.Random(options.seed), Counter(), 0
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="forge-ranks-") as folder:
        top = Path(folder)
        (top / "outside").mkdir()
        with h5py.File(top / "outside" / "secret.h5", "w") as secret:
            secret["x"] = np.zeros(500, "<f4")
        words = ["simulate", "jobs/digits.toml", "--nodes", "2", *SETTINGS]
        words = [sys.executable, "-m", "mpigossip", *words, f"run.output={top / 'run'}"]
        subprocess.run(words, check=True, capture_output=True, cwd=REPO)
        for number in range(options.count):
            if time.monotonic() > until:
                break
            run = top / f"case-{number}"
            shutil.copytree(top / "run", run)
            forger = Forger("checkpoint", checkpoint.latest(run), top / "outside", draw)
            forger.path = forger.folder / "node-0000.h5"
            ways = [forger.structure] * 4
            way = draw.choice([*ways, forger.place, forger.flip, forger.header, forger.manifest])
            said, ranks = way(), draw.choice([1, 3, 3, 4])
            code, told = resumed(run, ranks)
            good = code is not None and "Traceback" not in told
            good = good and ("mpigossip: " in told if code else way in (forger.flip, forger.header))
            found[f"{way.__name__}: {'goes on' if code == 0 else 'refused'}"] += good
            if not good:
                wrong += 1
                print(f"WRONG {number}, {ranks} ranks, {said}: exit code {code}\n{told[-900:]}")
            shutil.rmtree(run)
    for line, count in sorted(found.items()):
        print(f"{count:5}  {line}")
    print(f"{sum(found.values()) + wrong} forged, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
