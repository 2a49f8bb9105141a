"""Mutation tests: insert one fault at a time into a copy of the tree and expect its tests to fail.

A mutant is noticed if one of its tests fails (or exceeds pytest's own time limit) and the test that
failed passes without the fault. A mutant that no longer applies is an error: change its ``old`` to
the present code that does the same. tools/mutants.py and tests/double/mutants.py are tables of
mutants, which are run from the command line by :func:`main`.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
LIMIT_S = 900
"""Time limit in seconds for the tests of one mutant; a mutant that exceeds it is not noticed."""
REASONS = r"Unordered: .*", r"\w*(?:Error|Refused): (?!tests\.).*", r"Failed: .*"
"""Patterns of the message with which a test failed; the first that matches is shown."""


class Mutant(NamedTuple):
    """Fault that replaces the code ``old`` by ``new``, which occurs once in ``where``.

    ``where`` is a module of the package (``mpigossip.data.loader``), or the name of the only
    function or variable that contains ``old``; it includes the name of the class if the name alone
    is ambiguous (``Windows.notify``). The file that contains a function and the line breaks of the
    code do not matter. The second and later lines of ``new`` are indented relative to the code's
    line, unless ``old`` begins with the indentation of that line.

    ``tests`` is a file, a test or a folder in tests/ in which a test has to fail, or several, which
    are run one after another until a test fails.
    """

    name: str
    where: str
    old: str
    new: str
    tests: str | tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """Paths of the tests, relative to the repository."""
        tests = (self.tests,) if isinstance(self.tests, str) else self.tests
        return tuple(f"tests/{part}" for part in tests)

    def find(self, tree: Path) -> tuple[Path, int, int]:
        """Return the file, the begin and the end of the code in a tree.

        :raises ValueError: if the tree does not contain the code exactly once
        """
        pattern = pattern_of(self.old)
        matches = []
        searched = []
        for path, begin, end in self.spans(tree):
            searched.append(str(path.relative_to(tree)))
            matches += [(path, *m.span()) for m in pattern.finditer(path.read_text(), begin, end)]
        if len(matches) != 1:
            raise ValueError(
                f'mutant "{self.name}": {self.old!r} is {len(matches)} times in {self.where} '
                f"({', '.join(dict.fromkeys(searched)) or 'which is not in the package'}); "
                "give it the code that does the same now"
            )
        return matches[0]

    def spans(self, tree: Path) -> list[tuple[Path, int, int]]:
        """Return file, begin and end of the module or functions that may contain the code."""
        if self.where.startswith("mpigossip."):
            path = tree / f"{self.where.replace('.', '/')}.py"
            return [(path, 0, len(path.read_text()))]
        return [
            (path, begin, end)
            for path in sorted((tree / "mpigossip").rglob("*.py"))
            for begin, end in definitions(path.read_text(), self.where)
        ]


def planted(mutant: Mutant, tree: Path) -> tuple[Path, str]:
    """Return the file that contains the mutant's code in a tree, and its text with the fault."""
    path, begin, end = mutant.find(tree)
    text = path.read_text()
    before = text[text.rfind("\n", 0, begin) + 1 : begin]
    indent = before[: len(before) - len(before.lstrip())]
    return path, text[:begin] + mutant.new.replace("\n", f"\n{indent}") + text[end:]


def pattern_of(code: str) -> re.Pattern:
    """Return a pattern that matches code regardless of how its lines are broken.

    Indentation before the first line and the end of the last line have to match exactly, because
    they are replaced with the code.
    """
    body = code.strip()
    before, after = code[: len(code) - len(code.lstrip())], code[len(code.rstrip()) :]
    flexible = r"\s+".join(map(re.escape, body.split()))
    flexible = flexible.replace(r"\(", r"\(\s*").replace(r"\)", r",?\s*\)")
    return re.compile(re.escape(before) + flexible + re.escape(after))


parsed = functools.cache(ast.parse)


@functools.cache
def definitions(text: str, name: str) -> list[tuple[int, int]]:
    """Return where functions and variables of a name (`f`, `C.f`) begin and end in a text."""
    if not all(part in text for part in name.split(".")):
        return []
    starts = [0, *(match.end() for match in re.finditer("\n", text)), len(text)]
    spans = []

    def walk(node: ast.AST, outer: str) -> None:
        inner: Any
        for inner in ast.iter_child_nodes(node):
            target = inner.targets[0] if isinstance(inner, ast.Assign) else inner
            path = f"{outer}.{getattr(target, 'name', getattr(target, 'id', ''))}"
            if path.endswith(f".{name}"):
                spans.append((starts[inner.lineno - 1], starts[inner.end_lineno]))
            if isinstance(inner, ast.ClassDef | ast.FunctionDef):
                walk(inner, path)

    walk(parsed(text), "")
    return spans


def run_tests(tree: Path, tests: str) -> subprocess.CompletedProcess:
    """Run pytest in a tree until the first failure, as a process group that ends with its limit."""
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    limit = ["timeout", "--kill-after=10", str(LIMIT_S)]
    return subprocess.run([*limit, *command], cwd=tree, env=env, capture_output=True, text=True)


def failed_test(output: str) -> tuple[str | None, str]:
    """Return the first test that pytest reports as failed or in error, and the reason."""
    failure = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - (.*)|$)", output, re.MULTILINE)
    if failure is None:
        return None, ""
    matches = (re.search(pattern, output) for pattern in REASONS)
    return failure[1], next((match[0][:160] for match in matches if match), failure[2] or "")


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
        path, text = planted(mutant, tree)
        path.write_text(text)
        # One call each, because pytest would merge a file into its folder.
        for part in mutant.parts:
            done = run_tests(tree, part)
            test, reason = failed_test(done.stdout)
            if test:
                break
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    noticed = test is not None and run_tests(REPO, test).returncode == 0
    return {
        "mutant": mutant.name,
        "function": mutant.where,
        "noticed": noticed,
        "test": test or f"none (exit code {done.returncode})",
        "reason": reason,
        "seconds": round(time.monotonic() - began),
    }


def main(mutants: Sequence[Mutant], description: str) -> int:
    """Judge the mutants that the command line chooses, print the results; return the exit code.

    The exit code is 1 if a mutant is not noticed.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="names that contain a word")
    parser.add_argument("--list", action="store_true", help="names, functions and tests")
    parser.add_argument("--table", action="store_true", help="print rows of a Markdown table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    options = parser.parse_args()
    words = options.only or [""]
    chosen = [m for m in mutants if any(word in m.name for word in words)]
    if options.list:
        print(*(f"{m.name}: {m.where}, {' '.join(m.parts)}" for m in chosen), sep="\n")
        return 0
    rows = []
    for mutant in chosen:
        rows.append(row := judge(mutant))
        result = "noticed" if row["noticed"] else "NOT NOTICED"
        line = f"{row['seconds']:5} s  {result:11}  {mutant.name}: {row['test']} {row['reason']}"
        if options.table:
            line = f"| {mutant.name} | {row['reason'] if row['noticed'] else '**not caught**'} |"
        print(line, flush=True)
    noticed = sum(row["noticed"] for row in rows)
    print(f"{noticed} of {len(rows)} noticed in {sum(row['seconds'] for row in rows)} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(noticed < len(rows))
