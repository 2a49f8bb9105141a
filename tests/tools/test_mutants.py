"""The faults of tools/mutants.py can be planted in the code as it is."""

import runpy
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent


def test_every_mutant_applies_and_names_tests_that_exist():
    mutants = runpy.run_path(str(REPO / "tools/mutants.py"))["MUTANTS"]
    assert len(mutants) >= 40
    for one in mutants:
        assert (REPO / "mpigossip" / one.path).read_text().count(one.old) == 1, one
        assert one.old != one.new, one
        for part in one.tests.split():
            assert (REPO / "tests" / part).exists(), one
