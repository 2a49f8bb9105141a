"""The faults of tools/mutants.py and of the double can be planted in the code as it is."""

import ast
import runpy
from pathlib import Path

import pytest

from tests.double.mutants import MUTANTS, planted

REPO = Path(__file__).resolve().parent.parent.parent
TOOL = runpy.run_path(str(REPO / "tools/mutants.py"))


def test_every_mutant_applies_and_names_tests_that_exist(monkeypatch):
    assert len(TOOL["MUTANTS"]) >= 40
    planted = {}
    monkeypatch.setattr(Path, "write_text", lambda *file: planted.update([file]))
    lost = []
    for one in TOOL["MUTANTS"]:
        planted.clear()
        try:
            one.apply(REPO)
        except ValueError as error:
            lost.append(str(error))
            continue
        ((path, text),) = planted.items()
        ast.parse(text)
        assert text != path.read_text(), one
        assert all((REPO / "tests" / part.split("::")[0]).exists() for part in one.tests.split())
    assert not lost, "\n".join(lost)


def test_every_mutant_of_the_double_applies_and_names_a_test_that_exists():
    lost = []
    for one in MUTANTS:
        file, _, name = one[-1].partition("::")
        assert f"def {name.partition('[')[0]}(" in (REPO / file).read_text(), one
        try:
            _, text = planted(one, REPO)
        except ValueError as error:
            lost.append(str(error))
        else:
            ast.parse(text)
    assert not lost, "\n".join(lost)


def test_code_is_found_however_it_is_broken_into_lines_and_named_if_not(tmp_path):
    (tmp_path / "mpigossip").mkdir()
    file = tmp_path / "mpigossip/any.py"
    file.write_text("def f():\n    if a:\n        g(\n            1, 2)\n        h()\n")
    TOOL["Mutant"]("order", "f", "g( 1, 2)\nh()", "h()\ng(1, 2)", "").apply(tmp_path)
    assert file.read_text() == "def f():\n    if a:\n        h()\n        g(1, 2)\n"
    with pytest.raises(ValueError, match=r"'x' is 0 times in f\(\) \(mpigossip/any.py\)"):
        TOOL["Mutant"]("x", "f", "x", "", "").find(tmp_path)
