"""Settings that names imply, and the defaults of options."""

from copy import deepcopy

from mpigossip.config import SECTIONS
from mpigossip.config.choices import LOCAL, BuilderSpec, options_of, spec_of
from mpigossip.config.defaults import NAMES, may_be_unset, names_in_effect, with_defaults
from mpigossip.training.assemble import tables_of_names
from tests.config.tables import TABLES


def test_names_imply_settings_of_later_sections_only():
    """Names are therefore resolved in one pass over the sections."""
    order = list(SECTIONS)
    implied = 0
    for path, table in tables_of_names().items():
        for name in table:
            for other in BuilderSpec.of(table, name).implies:
                implied += 1
                assert order.index(path.split(".")[0]) < order.index(other.split(".")[0])
    assert implied > 40


def test_a_name_is_the_value_or_implied_or_the_default():
    names = names_in_effect({"algorithm": {"name": "tracking"}, "graph": 3}, TABLES)
    assert names["algorithm.name"] == "tracking"
    assert names[LOCAL] == "momentum"
    assert names["graph.name"] == "one-peer-exponential"
    assert names["node.wire"] == "fp32"
    assert names_in_effect({"algorithm": {"name": "parallel"}}, TABLES)["graph.name"] == "complete"
    for unset in (None, "none"):
        chosen = {"algorithm": {"name": "dsgd"}, "local": {"name": unset}}
        assert names_in_effect(chosen, TABLES)[LOCAL] == "sgd"
    assert names_in_effect({"graph": {"name": "none"}}, TABLES)["graph.name"] == "none"
    assert names_in_effect({}, {}) == {path: names[path] for path in NAMES.values()} | {
        "algorithm.name": "dmsgd",
        LOCAL: None,
    }


def test_defaults_are_added_to_new_sections():
    sections = {"algorithm": {"name": "parallel"}, "graph": {"hops": 2}}
    before = deepcopy(sections)
    complete, problems = with_defaults(sections, TABLES)
    assert sections == before and problems == []
    assert complete["graph"] == {"hops": 2, "name": "complete", "order": "cyclic"}
    assert with_defaults(complete, TABLES) == (complete, [])


def test_an_implied_value_is_not_stored_if_the_setting_may_be_unset():
    complete, problems = with_defaults({"algorithm": {"name": "tracking"}}, TABLES)
    assert complete["local"] == {"momentum": 0.5, "damping": 0.0} and problems == []
    assert [path for path in NAMES.values() if may_be_unset(path)] == [LOCAL]


def test_a_local_step_that_is_implied_has_an_entry():
    tables = tables_of_names()
    for name in tables["algorithm.name"]:
        local = BuilderSpec.of(tables["algorithm.name"], name).implies.get(LOCAL)
        assert local is None or spec_of(tables[LOCAL], local)
    assert "damping" in options_of(TABLES[LOCAL], "momentum")
