"""The tests that the page RELIABILITY.md selects by ``-k`` exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = "tools/labs/RELIABILITY.md"
SELECTION = re.compile(r'(?:(tests/\S+\.py)|the same, `)\s*-k (?:"([^"]+)"|([^\s`")]+))')


def selections(page):
    """Return a pair (file, expression) for each ``-k``; "the same" stands for the file before."""
    pairs = []
    file = ""
    for match in SELECTION.finditer(" ".join(page.split())):
        file = match[1] or file
        pairs.append((file, match[2] or match[3]))
    return pairs


def dead_clauses(expression, source):
    """Return the clauses of an expression, separated by "or", that select no test function."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    names = [f.name.lower() for f in functions if f.name.startswith("test_")]
    return [
        clause
        for clause in expression.lower().split(" or ")
        if not any(all(word in name for word in clause.split(" and ")) for name in names)
    ]


def test_each_selection_on_the_page_selects_a_test():
    page = (ROOT / PAGE).read_text()
    pairs = selections(page)
    assert len(pairs) == len(re.findall(r"(?<=[\s`])-k ", page)) > 50
    dead = [
        f"{file} -k {clause}"
        for file, expression in pairs
        for clause in dead_clauses(expression, (ROOT / file).read_text())
    ]
    assert not dead, f"{PAGE} selects tests that do not exist: {'; '.join(dead)}"


@pytest.mark.parametrize(
    ("expression", "dead"),
    [
        ("reads", []),
        ("reads and log", []),
        ("reads and disk", ["reads and disk"]),
        ("told or log", ["told"]),
        ("helper", ["helper"]),
    ],
)
def test_a_clause_without_a_test_is_found(expression, dead):
    source = "def test_it_reads_a_log(): pass\ndef test_a_disk(): pass\ndef helper(): pass\n"
    assert dead_clauses(expression, source) == dead


def test_selections_may_span_lines_and_refer_to_the_file_before():
    page = (
        '`pytest\n  tests/a.py -k one` (`tests/b.py -k "two or\n  three"`) | the same, `-k four` |'
    )
    expected = [("tests/a.py", "one"), ("tests/b.py", "two or three"), ("tests/b.py", "four")]
    assert selections(page) == expected
