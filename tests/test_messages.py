"""How tests match messages: by names and values, so that sentences can be reworded freely.

A test of an error or a printed line looks for the name of the setting, its value, the limit or a
name in the remedy, by :func:`tests.cases.naming`. To print the texts that have too much prose:

    python -m tests.test_messages
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.cases import MAX_PROSE, naming, on_each, prose

FOLDER = Path(__file__).parent
SEARCHES = {
    "search",
    "match",
    "fullmatch",
    "findall",
    "finditer",
    "count",
    "startswith",
    "endswith",
    "find",
    "index",
    "partition",
    "rpartition",
    "split",
    "removeprefix",
    "removesuffix",
}
"""Functions and methods whose first argument is a text that is looked for in another text."""


def columns(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield names with the expressions that they stand for in a function.

    These are the parameters of a parametrized test with their column of the table of cases, and the
    names of loops and comprehensions with the expression that is iterated over.
    """
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and len(decorator.args) >= 2:
            table = decorator.args[1]
            given = ast.literal_eval(decorator.args[0])
            names = given.replace(" ", "").split(",") if isinstance(given, str) else given
            for row in getattr(table, "elts", [table]):
                cells = row.elts if isinstance(row, ast.Tuple) and len(names) > 1 else [row]
                yield from zip(names, cells if len(cells) == len(names) else [], strict=False)
    for node in ast.walk(function):
        if isinstance(node, ast.For | ast.comprehension):
            names = [name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)]
            for row in getattr(node.iter, "elts", [node.iter]):
                cells = row.elts if isinstance(row, ast.Tuple) and len(names) > 1 else [row]
                yield from zip(names, cells if len(cells) == len(names) else [], strict=False)


def sought_by(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a node looks for in another text."""
    if isinstance(node, ast.keyword) and node.arg == "match":
        return [node.value]
    if isinstance(node, ast.Compare) and type(node.ops[0]).__name__.endswith("In"):
        return [node.left]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SEARCHES:
        return node.args[:1]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "naming":
        return [ast.Tuple(node.args)]
    return []


def literals(expression: ast.expr, names: list[tuple[str, ast.expr]]) -> Iterator[str]:
    """Yield the literal texts of an expression; a tuple or an f-string is one text."""
    constants = [node for node in ast.walk(expression) if isinstance(node, ast.Constant)]
    yield " ".join(node.value for node in constants if isinstance(node.value, str))
    used = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    for name, other in names:
        if name in used:
            yield from literals(other, [pair for pair in names if pair[0] not in used])


def pinned(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each literal that a module looks for in messages or other texts."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for scope in [*functions, tree]:
        names = list(columns(scope)) if isinstance(scope, ast.FunctionDef) else []
        for node in ast.walk(scope):
            for expression in sought_by(node):
                for text in literals(expression, names):
                    yield node.lineno, text


def long_texts() -> list[str]:
    """Return the places, with their texts, where tests look for too many words of prose."""
    places = set()
    for path in sorted(FOLDER.rglob("*.py")):
        for line, text in pinned(path.read_text("utf-8")):
            name = path.relative_to(FOLDER.parent).as_posix()
            if len(prose(text)) > MAX_PROSE:
                places.add(f"{name}:{line}: {text}")
    return sorted(places)


def test_tests_do_not_pin_the_prose_of_messages():
    places = long_texts()
    assert not places, (
        f"more than {MAX_PROSE} words of prose, so that rewording a message breaks a test: look for"
        " the setting, the value, the limit or one key word instead:\n" + "\n".join(places)
    )


def test_patterns_of_messages_are_made_by_naming():
    others = []
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "match":
                called = isinstance(node.value, ast.Call) and ast.unparse(node.value.func)
                if called != "naming":
                    others.append(f"{path.relative_to(FOLDER.parent)}:{node.value.lineno}")
    assert not others, f"write match=naming(FRAGMENT, …), of tests/cases.py: {', '.join(others)}"


@on_each(
    ("fragments", "message", "matches"),
    [
        (("data.batch = 0", "1"), "data.batch = 0: must be at least 1", True),
        (("1", "data.batch = 0"), "data.batch = 0:\nmust be at least 1", True),
        (("1",), "must be at least 12", False),
        (("1",), "must be at least 1.5", False),
        (("1",), "must be above -1", False),
        (("1",), "must be 1.", True),
        (("batch",), "data.batch = 0", False),
        (("data.batch",), "data.batch_size = 0", False),
        (("data.batch = 0", "2"), "data.batch = 0: must be at least 1", False),
        ((("--nodes 4", '"ring"'),), 'pass --nodes 4 for "ring"', True),
        (("--nodes",), "pass --nodes-file", False),
        ((".h5",), "out.h5", True),
    ],
)
def test_a_pattern_needs_all_of_its_fragments(fragments, message, matches):
    assert bool(re.search(naming(*fragments), message)) == matches


@on_each(
    ("text", "words"),
    [
        ("data.batch = 0: must be at least 1", ["must", "be", "at", "least"]),
        ('"the ring of nodes" `is it` and JobError', ["and"]),
        (r"rank \d+ can't (\w+)", ["rank", "can't"]),
        ("--nodes 4, runs/mine a/b.h5 MPI", []),
    ],
)
def test_names_values_and_quotations_are_not_prose(text, words):
    assert prose(text) == words


def test_long_texts_are_detected_wherever_they_are_sought():
    program = """
        @on_each(("n", "message"), [(1, "one two three four five"), (2, ("six", "seven"))])
        def test_a(n, message):
            with pytest.raises(Error, match=naming(message)):
                call(n)
            for word, other in (("eight", 1), ("nine", 2)):
                assert word in text
            assert "ten" not in text and re.search(f"eleven {n} twelve", text)
        """
    texts = {text for _, text in pinned(textwrap.dedent(program))}
    assert texts == {
        "",
        "one two three four five",
        "six seven",
        "eight",
        "nine",
        "ten",
        "eleven   twelve",
    }


def main() -> int:
    """Print the texts with too much prose."""
    print(*long_texts(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
