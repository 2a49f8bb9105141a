"""Print lines of the package, its tools and its tests, each beside its limit.

    python tools/lines.py        # exit code 1 where one is over

Counted are files of Python and C, blank lines and docstrings included.
"""

import ast
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".c")


def files(folder: str) -> list[Path]:
    """Source files below a folder."""
    return [path for path in (REPO / folder).rglob("*") if path.suffix in SUFFIXES]


def lines(*paths: Path) -> int:
    """Lines of files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def lines_of(path: Path, cls: str, method: str) -> int:
    """Lines of a method, its docstring included."""
    tree = ast.parse(path.read_text("utf-8"))
    (found,) = (
        node
        for owner in tree.body
        if isinstance(owner, ast.ClassDef) and owner.name == cls
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and node.name == method
    )
    return found.end_lineno - found.lineno + 1


def main() -> int:
    """Print the table."""
    step = REPO / "mpigossip" / "engine" / "step.py"
    modules = [path for path in files("mpigossip") if path.suffix == ".py"]
    table = [
        ("mpigossip/", lines(*files("mpigossip")), 34_000),
        ("modules in it", len(modules), 220),
        ("tools/", lines(*files("tools")), 5_700),
        ("tests/", lines(*files("tests")), 24_000),
        ("engine/step.py", lines(step), 240),
        ("Engine.step", lines_of(step, "Engine", "step"), 25),
    ]
    print("| | now | at most |\n|---|---|---|")
    for name, now, most in table:
        print(f"| {name} | {now:,}{' (over)' * (now > most)} | {most:,} |")
    return int(any(now > most for _, now, most in table))


if __name__ == "__main__":
    sys.exit(main())
