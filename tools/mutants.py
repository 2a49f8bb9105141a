"""Mutation tests: plant one fault at a time in a copy of the tree, run its tests, expect a failure.

    python tools/mutants.py                   all of them, a table at the end
    python tools/mutants.py --only flush nan  those whose names contain a word
    python tools/mutants.py --list            names, files and tests

A mutant is noticed when its tests fail (or hang until pytest's own limit) and the test that
failed passes without it. Exit code 1 if one is not noticed. A mutant that no longer applies is an
error: change its text together with the code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
LIMIT_S = 900
"""Seconds for the tests of one mutant; what is not noticed by then is not noticed."""


class Mutant(NamedTuple):
    """A fault: in ``path`` the text ``old``, found once, becomes ``new``.

    ``tests``: the folder in tests/ of which one must fail, after files of it that are run first.
    """

    name: str
    path: str
    old: str
    new: str
    tests: str

    def apply(self, tree: Path) -> None:
        """Plant the fault in a copy of the tree; ValueError where its text isn't found once."""
        file = tree / "mpigossip" / self.path
        text = file.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f'mutant "{self.name}": {count} times {self.old!r} in {self.path}')
        file.write_text(text.replace(self.old, self.new))


# where a folder is slow, the file of it that knows the mutated module is run first
WINDOWS = "mixing/test_windows.py mixing"
WIRE = "mixing/test_wire.py mixing"
SIMULATED = "mixing/test_simulated.py mixing"
RUN = "runs/test_run.py runs"

MUTANTS = [
    # exchange between nodes: notifications, flush, buffers, the sum
    Mutant("token of another round", "mixing/host/shared.py",
           "self._tokens.send(ranks, tag, t)", "self._tokens.send(ranks, tag, t + 1)", WINDOWS),
    Mutant("flush left out", "mixing/host/push.py",
           "self._window.Flush(rank)", "pass", WINDOWS),
    Mutant("told before the flush", "mixing/host/push.py",
           "            self._window.Flush(rank)\n            self.signals.tell([rank], number)",
           "            self.signals.tell([rank], number)\n            self._window.Flush(rank)",
           WINDOWS),
    Mutant("outbox reused before it was read", "mixing/windows.py",
           "reach.host.await_done(reach.near(now.readers), now.t)", "pass", WINDOWS),
    Mutant("inbox not double-buffered", "mixing/host/push.py",
           "half = self.signals.round(number) % 2", "half = 0", WINDOWS),
    Mutant("room not waited for", "mixing/tokens.py",
           "if self._free is None or count < 2:", "if True:", WINDOWS),
    Mutant("own weight wrong", "mixing/plan.py",
           "(float(own), *map(float, weights))", "(float(weights[0]), *map(float, weights))",
           WINDOWS),
    Mutant("order of a sum", "mixing/plan.py",
           "tuple(map(int, nodes)), (float(own)", "tuple(map(int, nodes[::-1])), (float(own)",
           WINDOWS),
    Mutant("last column cut", "mixing/host/shared.py",
           "slice(middle, count)", "slice(middle, count - 1)", WINDOWS),
    Mutant("half of a pair not waited for", "mixing/host/shared.py",
           "        self.await_half(partner, t)\n        return", "        return", WINDOWS),
    Mutant("random wire draws alike in every shard", "mixing/wire.py",
           "bits.advance(first // BUCKET * count // 8)", "bits.advance(0)", WIRE),
    Mutant("last chunk not encoded", "mixing/wire.py",
           "for begin in range(0, values.numel(), CHUNK):",
           "for begin in range(0, max(values.numel() - CHUNK, 1), CHUNK):", WIRE),
    Mutant("messages of two rounds mixed up", "mixing/messages.py",
           "tag = FIRST_TAG + now.t % ROUNDS", "tag = FIRST_TAG", SIMULATED),
    Mutant("simulated rows shifted", "mixing/simulated.py",
           "slice((a + s) % n, (a + s) % n + b - a)", "slice(a, b)", SIMULATED),
    Mutant("plan of another round", "mixing/plan.py",
           "key = kind, t % period if period else t", "key = kind, 0 if period else t", WINDOWS),
    # a step, its counters and its state
    Mutant("graph's clock counts global averages", "engine/step.py",
           "self.round += now.kind is Kind.GOSSIP", "self.round += now.kind is not Kind.LOCAL",
           "engine"),
    Mutant("resumed counter + 1", "engine/step.py",
           "(int(numbers[k]) for k in", "(int(numbers[k]) + 1 for k in", RUN),
    Mutant("NaN let through", "engine/finite.py",
           "if math.isfinite(total):", "if True:", "engine"),
    Mutant("state of a node restored to row 0", "engine/state.py",
           "part[row].copy_(pieces[shard])", "part[0].copy_(pieces[shard])", RUN),
    Mutant("slots not gathered", "groups/threads.py",
           "part.copy_(shards[other])", "pass", "groups"),
    Mutant("gradients summed, not averaged", "groups/threads.py",
           "weights = [1 / self.slots] * self.slots", "weights = [1.0] * self.slots", "groups"),
    Mutant("shared-memory barrier passes early", "groups/board.py",
           "if count[0] < self._count]", "if count[0] < self._count - 1]", "groups"),
    # formulas
    Mutant("momentum not averaged", "algorithms/gossip.py",
           "state.momentum.copy_(mixed[1])", "state.momentum.copy_(sent[1])", "algorithms"),
    Mutant("quasi-global momentum without the rate", "algorithms/gossip.py",
           "alpha=mu / step.lr)", "alpha=mu)", "algorithms"),
    Mutant("skipped row steps along", "algorithms/local.py",
           "for row in range(len(x)) if row not in step.skipped]", "for row in range(len(x))]",
           "algorithms"),
    Mutant("Adam corrected by the steps of all", "algorithms/local.py",
           "step._replace(index=counts[row], skipped", "step._replace(skipped", "engine"),
    Mutant("CHOCO without its memory", "algorithms/compressed.py",
           "state.memory.add_(mixed[0])", "state.memory.copy_(mixed[0])", "algorithms"),
    Mutant("error feedback forgets", "algorithms/compressed.py",
           "state.error.sub_(sent[0])", "state.error.zero_()", "algorithms"),
    Mutant("DeTAG's phase one short", "algorithms/tracking.py",
           "if r == phase - 1:", "if r == max(phase - 2, 0):", "algorithms"),
    Mutant("period off by one", "algorithms/cadence.py",
           "others if (index + 1) % period else last", "others if index % period else last",
           "algorithms"),
    Mutant("ADPSGD's thresholds exchanged", "algorithms/cadence.py",
           "period += (ratio < low * state.level) - (ratio > high * state.level)",
           "period -= (ratio < low * state.level) - (ratio > high * state.level)", "algorithms"),
    Mutant("a fragment's turn too early", "algorithms/cadence.py",
           "place = index % self.period + 1", "place = (index + 1) % self.period + 1",
           "algorithms"),
    Mutant("one peer from the other side", "graphs/exponential.py",
           "tuple(n - d for d in distances)", "distances", "graphs"),
    Mutant("receivers are the senders", "graphs/rounds.py",
           "return (j - self._offsets) % self.n", "return (j + self._offsets) % self.n", "graphs"),
    # data
    Mutant("another epoch, the same order", "data/partition.py",
           "permutation(len(self.part), self.seed, ORDER, epoch, self.node)",
           "permutation(len(self.part), self.seed, ORDER, 0, self.node)", "data"),
    Mutant("seed + 1", "data/partition.py",
           "order = permutation(len(labels), seed, SPLIT)",
           "order = permutation(len(labels), seed + 1, SPLIT)", "data"),
    # files and runs
    Mutant("checkpoint under its final name at once", "store/checkpoint.py",
           'temporary = folder(run, step).with_suffix(".writing")',
           "temporary = folder(run, step)", "store"),
    Mutant("checksum not compared", "store/checkpoint.py",
           "if checksum != entry.checksum:", "if False:", "store"),
    Mutant("pending changes of a log forgotten", "store/journal.py",
           "    if change is not None and path.exists():\n        _apply(path, *change)\n", "",
           "store"),
    Mutant("elastic resume drops momentum", "runs/elastic.py",
           'AVERAGED = {"momentum", "first", "second"}', "AVERAGED = set()", RUN),
    Mutant("the oldest checkpoint of two is kept", "store/checkpoint.py",
           "for step, path in whole[:-keep]", "for step, path in whole[keep:]", "store"),
]  # fmt: skip


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess:
    """Run pytest in a tree until the first failure, as a process group that ends with its limit."""
    place = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": place, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    limit = ["timeout", "--kill-after=10", str(LIMIT_S)]
    return subprocess.run([*limit, *command], cwd=tree, env=env, capture_output=True, text=True)


def failed_test(output: str) -> str | None:
    """The name of the first test that pytest reports as failed or in error."""
    found = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", output, re.MULTILINE)
    return found[1] if found else None


def copy_of(tree: Path) -> Path:
    """The files that git tracks, in a new folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True
    )
    copy = Path(tempfile.mkdtemp(prefix="mutant-"))
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, copy / name)
    return copy


def judge(mutant: Mutant) -> dict:
    """Run the mutant's tests with the fault, then the test that failed without it."""
    began, tree = time.monotonic(), copy_of(REPO)
    try:
        mutant.apply(tree)
        done = run_tests(tree, [f"tests/{part}" for part in mutant.tests.split()])
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    test = failed_test(done.stdout)
    noticed = test is not None and run_tests(REPO, [test]).returncode == 0
    return {
        "mutant": mutant.name,
        "file": mutant.path,
        "noticed": noticed,
        "test": test or f"none (exit code {done.returncode})",
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    """Judge the mutants that were asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="names that contain a word")
    parser.add_argument("--list", action="store_true", help="names, files and tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.only or any(word in m.name for word in given.only)]
    if given.list:
        print(*(f"{m.name}: mpigossip/{m.path}, tests/{m.tests}" for m in chosen), sep="\n")
        return 0
    rows = []
    for mutant in chosen:
        rows.append(row := judge(mutant))
        result = "noticed" if row["noticed"] else "NOT NOTICED"
        print(f"{row['seconds']:5} s  {result:11}  {mutant.name}: {row['test']}", flush=True)
    noticed = sum(row["noticed"] for row in rows)
    print(f"{noticed} of {len(rows)} noticed in {sum(row['seconds'] for row in rows)} s")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(noticed < len(rows))


if __name__ == "__main__":
    sys.exit(main())
