"""Choice of few cases in which values of different fields meet as they do in all cases."""

import itertools

from tests.cases import covering, on_each

FIELDS = ("ring", "star", "complete"), (2, 3, 4), ("read", "put"), (False, True)
ALL = list(itertools.product(*FIELDS))
POSSIBLE = [case for case in ALL if case[:2] != ("star", 2)]
"""All cases, except cases that contain a certain pair."""


def combinations(cases, strength):
    return {c for case in cases for c in itertools.combinations(enumerate(case), strength)}


@on_each(("cases", "strength", "most"), [(ALL, 2, 12), (POSSIBLE, 2, 12), (ALL, 3, 24)])
def test_few_cases_have_all_combinations(cases, strength, most):
    chosen = covering(cases, strength)
    assert set(chosen) <= set(cases) and len(chosen) <= most
    assert combinations(chosen, strength) == combinations(cases, strength)
    assert covering(cases, strength) == chosen


def test_combinations_that_run_elsewhere_do_not_occur_again():
    elsewhere = [case for case in ALL if case[0] == "ring"]
    chosen = covering(ALL, covered=elsewhere)
    assert combinations([*chosen, *elsewhere], 2) == combinations(ALL, 2)
    assert len(chosen) < len(covering(ALL)) and "ring" not in {case[0] for case in chosen}


def test_pairs_of_two_fields_can_be_left_out():
    chosen = covering(ALL, excluded=(0, 1))
    left = {pair for pair in combinations(ALL, 2) if tuple(at for at, _ in pair) != (0, 1)}
    assert left <= combinations(chosen, 2) and len(chosen) < 9
