"""Mutation tests: insert one fault at a time into a copy of the tree and expect its tests to fail.

    python tools/mutants.py                   run all mutants, and print a table at the end
    python tools/mutants.py --only flush nan  run those whose names contain one of the words
    python tools/mutants.py --list            list names, functions and tests

A mutant is noticed if its tests fail (or exceed pytest's own time limit) and the test that failed
passes without the fault. The exit code is 1 if any mutant is not noticed. A mutant that no longer
applies is an error: change its ``old`` to the present code that does the same.
"""

import argparse
import ast
import functools
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
"""Time limit in seconds for the tests of one mutant; a mutant that exceeds it is not noticed."""


class Mutant(NamedTuple):
    """Fault that replaces the code ``old`` by ``new`` in a function of the package.

    ``function`` is the name of the only function, or variable, that contains ``old``; it includes
    the name of the class if the name alone is ambiguous. The file that contains the function and
    the line breaks of the code do not matter. ``tests`` is a folder in tests/ in which a test has
    to fail; a file of the folder that is named before it is run first.
    """

    name: str
    function: str
    old: str
    new: str
    tests: str

    def find(self, tree: Path) -> tuple[Path, int, int]:
        """Return the file, the begin and the end of the code in a tree.

        :raises ValueError: if the tree does not contain the code exactly once
        """
        pattern = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        found = []
        seen = []
        for path in sorted((tree / "mpigossip").rglob("*.py")):
            text = path.read_text()
            for begin, end in definitions(text, self.function):
                seen.append(str(path.relative_to(tree)))
                found += [(path, *m.span()) for m in pattern.finditer(text, begin, end)]
        if len(found) != 1:
            raise ValueError(
                f'mutant "{self.name}": {self.old!r} is {len(found)} times in {self.function}() '
                f"({', '.join(dict.fromkeys(seen)) or 'which is not in the package'}); "
                "give it the code that does the same now"
            )
        return found[0]

    def apply(self, tree: Path) -> None:
        """Insert the fault into a copy of the tree."""
        path, begin, end = self.find(tree)
        text = path.read_text()
        line = text[text.rfind("\n", 0, begin) + 1 :]
        indent = line[: len(line) - len(line.lstrip())]
        path.write_text(text[:begin] + self.new.replace("\n", f"\n{indent}") + text[end:])


parsed = functools.cache(ast.parse)


@functools.cache
def definitions(text: str, name: str) -> list[tuple[int, int]]:
    """Return where functions and variables of a name (`f`, `C.f`) begin and end in a text."""
    if not all(part in text for part in name.split(".")):
        return []
    starts = [0, *(match.end() for match in re.finditer("\n", text)), len(text)]
    found = []

    def walk(node: ast.AST, outer: str) -> None:
        for inner in ast.iter_child_nodes(node):
            own = inner.targets[0] if isinstance(inner, ast.Assign) else inner
            path = f"{outer}.{getattr(own, 'name', getattr(own, 'id', ''))}"
            if path.endswith(f".{name}"):
                found.append((starts[inner.lineno - 1], starts[inner.end_lineno]))
            if isinstance(inner, ast.ClassDef | ast.FunctionDef):
                walk(inner, path)

    walk(parsed(text), "")
    return found


# If the tests of a folder are slow, the file that tests the mutated module is run first.
WINDOWS = "mixing/test_windows.py mixing"
TRANSPORTS = "mixing/test_transports.py mixing"
WIRE = "mixing/test_wire.py mixing"
ASYNCHRONOUS = "mixing/test_asynchronous.py mixing"
SIMULATED = "mixing/test_simulated.py mixing"
RUN = "runs/test_run.py runs"
STEP = "engine/test_step.py engine"
FORMULAS = "algorithms/test_algorithms.py"
LIMITS = f"{FORMULAS}::test_limits_have_the_published_order algorithms"
QUASI_GLOBAL = f"{FORMULAS}::test_quasi_global_momentum_is_that_of_its_paper algorithms"
MEANS = f"{FORMULAS}::test_mean_is_preserved_and_consensus_reached algorithms"
LATER = f"{FORMULAS}::test_what_a_biased_wire_leaves_out_is_sent_later algorithms"
LISTING = f"{FORMULAS}::test_detag_is_the_listing_of_its_paper algorithms"
CADENCE = "algorithms/test_cadence.py algorithms"
RANKS = "groups/test_ranks.py groups"

MUTANTS = [
    # exchange between nodes: notifications, flush, buffers, the sum
    Mutant("notification of another round", "SharedOutboxes.publish",
           "READY, t)", "READY, t + 1)", WINDOWS),
    Mutant("flush left out", "Windows.notify",
           "window.Flush(rank)", "pass", TRANSPORTS),
    Mutant("notified before the flush", "Windows.notify",
           "for rank, _ in r.plan.targets:",
           "for rank, _ in r.plan.targets:\n"
           "    self.notifications.send([rank], ARRIVED, self.number(r, chunk))\n"
           "for rank, _ in ():",
           TRANSPORTS),
    Mutant("outbox reused before it was read", "_end_round",
           "self._shared.wait_read(r.plan.readers, r.t)", "pass", WINDOWS),
    Mutant("inbox not double-buffered", "Windows.send",
           "half = r.index % 2", "half = 0", WINDOWS),
    Mutant("free buffer not waited for", "Windows.is_free",
           "return r.index < 2 or", "return True or", WINDOWS),
    Mutant("own weight wrong", "RoundPlan.of",
           "all_weights = float(own), *map(float, weights)",
           "all_weights = float(weights[0] if len(weights) else own), *map(float, weights)",
           WINDOWS),
    Mutant("order of a sum", "RoundPlan.of",
           "sources = tuple(map(int, nodes))", "sources = tuple(map(int, nodes[::-1]))",
           WINDOWS),
    Mutant("last column cut", "_half",
           "slice(middle, count)", "slice(middle, count - 1)", WINDOWS),
    Mutant("half of a pair not waited for", "average_pair",
           "self.wait_half(index, t)\nreturn", "return", WINDOWS),
    Mutant("random wire draws alike in every shard", "draw",
           "bits.advance(first // BUCKET * count // 8)", "bits.advance(0)", WIRE),
    Mutant("last chunk not encoded", "write",
           "for begin in range(0, values.numel(), CHUNK):",
           "for begin in range(0, max(values.numel() - CHUNK, 1), CHUNK):", WIRE),
    Mutant("own messages not waited for", "Messages.release",
           "if self._sends:", "if False:", "runs/test_survive.py mixing"),
    Mutant("simulated rows shifted", "_find_ranges",
           "slice((a + s) % n, (a + s) % n + b - a)", "slice(a, b)", SIMULATED),
    Mutant("plan of another round", "_plan_of",
           "t % self._period if self._period", "0 if self._period", WINDOWS),
    Mutant("torn copy used", "Asynchronous._is_complete",
           "return done == begun", "return done > 0", ASYNCHRONOUS),
    Mutant("counter read after the model left out", "Asynchronous._read",
           "begun = self._load(j, 8 * BEGUN)", "begun = done", ASYNCHRONOUS),
    Mutant("deposit counted twice", "Asynchronous._apply_corrections",
           "if number == self._included[j]:", "if not number:", ASYNCHRONOUS),
    # a step, its counters and its state
    Mutant("graph's clock counts global averages", "record",
           "self.round += now.kind is ExchangeKind.GOSSIP", "self.round += now.kind is not "
           "ExchangeKind.LOCAL",
           STEP),
    Mutant("resumed counter + 1", "restore_counters",
           'self.index = int(numbers["index"])', 'self.index = int(numbers["index"]) + 1', RUN),
    Mutant("NaN let through", "check_message",
           "if math.isfinite(total):", "if True:", STEP),
    Mutant("state of a node restored to row 0", "scatter_row",
           "part[row].copy_(pieces[shard])", "part[0].copy_(pieces[shard])", RUN),
    Mutant("slots not gathered", "fetch",
           "part.copy_(shards[other])", "pass", "groups"),
    Mutant("gradients summed, not averaged", "reduce_scatter_mean",
           "weights = [1 / self.slots] * self.slots", "weights = [1.0] * self.slots", "groups"),
    Mutant("shared-memory barrier passes early", "missing",
           "if count[0] < self._count]", "if count[0] < self._count - 1]", RANKS),
    # formulas
    Mutant("momentum not averaged", "receive",
           "state.momentum.copy_(mixed[1])", "state.momentum.copy_(sent[1])", LIMITS),
    Mutant("quasi-global momentum without the rate", "receive",
           "alpha=mu / step.lr)", "alpha=mu)", QUASI_GLOBAL),
    Mutant("skipped row steps along", "adapt",
           "for row in range(len(x)) if row not in step.skipped]", "for row in range(len(x))]",
           "algorithms/test_steps_by_node.py algorithms"),
    Mutant("Adam corrected by the steps of all", "adapt",
           "step._replace(index=counts[row], skipped", "step._replace(skipped", STEP),
    Mutant("CHOCO without its memory", "receive",
           "state.memory.add_(mixed[0])", "state.memory.copy_(mixed[0])", MEANS),
    Mutant("error feedback forgets", "error_feedback.receive",
           "state.error.sub_(sent[0])", "state.error.zero_()", LATER),
    Mutant("DeTAG's phase one short", "receive",
           "if r == phase - 1 and not step.waits:", "if r == max(phase - 2, 0):", LISTING),
    Mutant("period off by one", "_each",
           "others if (index + 1) % period else last", "others if index % period else last",
           CADENCE),
    Mutant("ADPSGD's thresholds exchanged", "observe",
           "period += (ratio < low * state.level) - (ratio > high * state.level)",
           "period -= (ratio < low * state.level) - (ratio > high * state.level)", CADENCE),
    Mutant("a fragment's turn too early", "due",
           "position = index % self.period + 1", "position = (index + 1) % self.period + 1",
           "engine"),
    Mutant("one peer from the other side", "from_behind",
           "tuple(n - d for d in distances)", "distances", "graphs"),
    Mutant("receivers are the senders", "receivers",
           "return (j - self._offsets) % self.n", "return (j + self._offsets) % self.n", "graphs"),
    # data
    Mutant("another epoch, the same order", "draw_together",
           "outdated[0].seed, ORDER, epoch", "outdated[0].seed, ORDER, 0", "data"),
    Mutant("seed + 1", "partition",
           "order = permutation(len(labels), seed, SPLIT)",
           "order = permutation(len(labels), seed + 1, SPLIT)", "data"),
    # files and runs
    Mutant("checkpoint under its final name at once", "begin",
           'temporary = folder(run, step).with_suffix(".writing")',
           "temporary = folder(run, step)", "store"),
    Mutant("checksum not compared", "_check_bytes",
           "if checksum != entry.checksum:", "if False:", "store"),
    Mutant("pending changes of a log forgotten", "recover",
           "if change is not None and path.exists(): _apply(path, *change)", "pass",
           "store"),
    Mutant("elastic resume drops momentum", "AVERAGED",
           'AVERAGED = {"momentum", "first", "second"}', "AVERAGED = set()", RUN),
    Mutant("the oldest checkpoint of two is kept", "prune",
           "for step, path in complete[:-keep]", "for step, path in complete[keep:]", "store"),
]  # fmt: skip


def run_tests(tree: Path, tests: str) -> subprocess.CompletedProcess:
    """Run pytest in a tree until the first failure, as a process group that ends with its limit."""
    place = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": place, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    limit = ["timeout", "--kill-after=10", str(LIMIT_S)]
    return subprocess.run([*limit, *command], cwd=tree, env=env, capture_output=True, text=True)


def failed_test(output: str) -> tuple[str | None, str]:
    """Return the first test that pytest reports as failed or in error, and the reason."""
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - (.*)|$)", output, re.MULTILINE)
    return (found[1], found[2] or "") if found else (None, "")


def copy_of(tree: Path) -> Path:
    """Copy the files that git tracks into a new folder, and return that folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True
    )
    copy = Path(tempfile.mkdtemp(prefix="mutant-"))
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, copy / name)
    return copy


def judge(mutant: Mutant) -> dict:
    """Run the mutant's tests with the fault, then the failed test without the fault."""
    began = time.monotonic()
    tree = copy_of(REPO)
    try:
        mutant.apply(tree)
        # One call each, because pytest would merge a file into its folder.
        for part in mutant.tests.split():
            done = run_tests(tree, f"tests/{part}")
            test, reason = failed_test(done.stdout)
            if test:
                break
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    noticed = test is not None and run_tests(REPO, test).returncode == 0
    return {
        "mutant": mutant.name,
        "function": mutant.function,
        "noticed": noticed,
        "test": test or f"none (exit code {done.returncode})",
        "reason": reason,
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    """Judge the chosen mutants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="names that contain a word")
    parser.add_argument("--list", action="store_true", help="names, functions and tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.only or any(word in m.name for word in given.only)]
    if given.list:
        print(*(f"{m.name}: {m.function}(), tests/{m.tests}" for m in chosen), sep="\n")
        return 0
    rows = []
    for mutant in chosen:
        rows.append(row := judge(mutant))
        result = "noticed" if row["noticed"] else "NOT NOTICED"
        said = f"{row['test']} {row['reason']}"
        print(f"{row['seconds']:5} s  {result:11}  {mutant.name}: {said}", flush=True)
    noticed = sum(row["noticed"] for row in rows)
    print(f"{noticed} of {len(rows)} noticed in {sum(row['seconds'] for row in rows)} s")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(noticed < len(rows))


if __name__ == "__main__":
    sys.exit(main())
