"""Tables as text."""

from mpigossip.analysis.aligned import aligned


def test_columns_are_as_wide_as_their_longest_cell():
    rows = [("", "ms", "note"), ("ring", 12.5, "{}"), ("exponential", 3, "")]
    expected = """\
               ms  note
ring         12.5  {}
exponential     3"""
    assert aligned(rows, left=(0, 2)) == expected
    assert aligned([("a", "b"), ("", "")]) == "a  b\n"
    assert aligned([]) == ""
