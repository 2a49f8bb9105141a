"""The faults of tools/mutants.py and of the double can be planted in the code as it is."""

import ast
import runpy

import pytest

from tests.cases import naming
from tests.double import mutants as double
from tests.mutation import REPO, Mutant, planted

TABLES = {
    "tools": runpy.run_path(str(REPO / "tools/mutants.py"))["MUTANTS"],
    "double": double.MUTANTS,
}


@pytest.mark.parametrize("table", TABLES)
def test_every_mutant_applies_and_names_tests_that_exist(table):
    assert len(TABLES[table]) >= 40
    lost = []
    for mutant in TABLES[table]:
        for part in mutant.parts:
            file, _, test = part.partition("::")
            assert (REPO / file).exists(), mutant
            name = test.partition("[")[0]
            assert not name or f"def {name}(" in (REPO / file).read_text(), mutant
        try:
            path, text = planted(mutant, REPO)
        except ValueError as error:
            lost.append(str(error))
            continue
        ast.parse(text)
        assert text != path.read_text(), mutant
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("where", ["f", "mpigossip.any"])
def test_code_is_found_however_it_is_broken_into_lines_and_named_if_not(tmp_path, where):
    (tmp_path / "mpigossip").mkdir()
    file = tmp_path / "mpigossip/any.py"
    file.write_text("def f():\n    if a:\n        g(\n            1, 2)\n        h()\n")
    mutant = Mutant("order", where, "g( 1, 2)\nh()", "h()\ng(1, 2)", "")
    changed = "def f():\n    if a:\n        h()\n        g(1, 2)\n"
    assert planted(mutant, tmp_path) == (file, changed)
    indented = mutant._replace(old="        h()\n", new="    h()\n    g()\n")
    assert planted(indented, tmp_path)[1].endswith("1, 2)\n    h()\n    g()\n")
    with pytest.raises(ValueError, match=naming("'x'", f"0 times in {where}", "mpigossip/any.py")):
        Mutant("x", where, "x", "", "").find(tmp_path)
