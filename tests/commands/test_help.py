"""Texts in the program: help texts, their examples, docstrings."""

import argparse
import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import mpigossip
from mpigossip import cli
from mpigossip.commands.arguments import every

PACKAGE = Path(mpigossip.__file__).parent
PARSERS = dict(every(cli.parser()))


@pytest.mark.parametrize("words", PARSERS, ids=lambda words: words or "mpigossip")
def test_help_fits_a_screen_and_has_an_example(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = PARSERS[words].format_help()
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert re.search(r"^examples?:\n  .*mpigossip", text, re.MULTILINE)
    assert "jobs/" not in text  # use names: the wheel does not contain this folder
    for line in re.findall(
        r"^  (?:srun (?:-N \d+ )?|mpirun -n \d+ )?(mpigossip .+)$", text, re.MULTILINE
    ):
        if not line.endswith("\\"):
            line = line.replace(",…", "").partition(" >")[0]
            cli._parse(shlex.split(line)[1:])  # exits if the program does not accept it


def test_without_arguments_the_help_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert not ended.value.code and "mpirun -n 4 mpigossip train" in capsys.readouterr().out


def test_the_help_does_not_wait_for_numpy():
    program = (
        "import sys; from mpigossip import cli; cli.parser(); sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_every_argument_has_a_help_text():
    silent = [
        f"{words} {action.dest}"
        for words, parser in PARSERS.items()
        for action in parser._actions
        if not action.help
        and not isinstance(action, argparse._SubParsersAction)
        and not action.metavar
    ]
    assert silent == []


def test_facts_of_a_graph_fit_a_terminal(capsys):
    words = ["graph", "show", "one-peer-exponential", "--nodes", "12"]
    assert cli.main([*words, "--parameters", "999999999"]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert len(lines) > 9 and max(map(len, lines)) <= 80


def public(tree, prefix=""):
    """Yield names and syntax nodes of a module's public classes, functions and methods."""
    for node in tree.body:
        setter = any(
            ast.unparse(d).endswith(".setter") for d in getattr(node, "decorator_list", ())
        )
        named = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if named and not setter:  # a property is documented at its getter
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{prefix}{node.name}.")


def test_a_method_without_a_docstring_overrides_one_that_has_it():
    """Ruff checks all other docstrings."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    documented = [(name, ast.get_docstring(node)) for tree in trees for name, node in public(tree)]
    methods = [(*name.rsplit(".", 1), text) for name, text in documented if "." in name]
    described = {name for _, name, text in methods if text}
    assert "start" in described
    assert [f"{cls}.{name}" for cls, name, _ in methods if name not in described] == []


def test_the_package_contains_its_type_marker():
    assert (PACKAGE / "py.typed").exists()
