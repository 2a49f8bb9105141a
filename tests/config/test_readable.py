"""Texts that are safe for terminals and spreadsheets."""

import ast
import io
import math
import random
import re
import sys
from pathlib import Path

import mpigossip
from mpigossip import cli
from mpigossip.config import JobError
from mpigossip.config.readable import aligned, cells, format_bytes, print_note, printable

JOB = str(Path(__file__).parents[2] / "jobs" / "digits.toml")
EVIL = "a\x1b[31mb\x9b2Jc\u202ed\re"


def test_unprintable_characters_are_escaped():
    assert printable(EVIL + "\n\tä→") == "a\\x1b[31mb\\x9b2Jc\\u202ed\\re\n\tä→"
    assert printable("\udc80 \x7f") == "\\udc80 \\x7f"
    assert cells(["=1+1", "+a", "-b", "@c", "", "a=b", -1.5]) == [
        "'=1+1",
        "'+a",
        "'-b",
        "'@c",
        "",
        "a=b",
        -1.5,
    ]


def test_everything_is_printed_by_one_function():
    top = Path(mpigossip.__file__).parent
    prints = {
        str(path.relative_to(top))
        for path in top.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    }
    # the second one is a child process whose output its parent reads
    assert prints == {"config/readable.py", "mixing/device/proof.py"}


def test_names_in_files_are_escaped_on_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["model.name=mlp", "model.hidden=[4]", "run.steps=1", "schedule.warmup_epochs=0"]
    named = f'run.name="{EVIL}"'.encode("unicode_escape").decode().replace("\\x", "\\u00")
    start = ["simulate", JOB, "--nodes", "2", *small, named, "run.output=run"]
    commands = [
        start,
        ["log", "show", "run"],
        ["checkpoint", "show", "run"],
        ["resume", "run", "--simulate", "run.steps=2"],
        [*start, "run.seed=1"],  # another job
        ["graph", "show", f"file:{EVIL}", "--nodes", "2"],
    ]
    for words in commands:
        cli.main(words)
        output = capsys.readouterr()
        unprintable = {
            c for c in output.out + output.err if not c.isprintable() and c not in "\n\t"
        }
        assert not unprintable, (words, output)
        assert words is not start or "\\x1b[31m" in output.out, output


def test_columns_are_as_wide_as_their_longest_cell():
    rows = [("", "ms", "note"), ("ring", 12.5, "{}"), ("exponential", 3, "")]
    expected = """\
               ms  note
ring         12.5  {}
exponential     3"""
    assert aligned(rows, left=(0, 2)) == expected
    assert aligned([("a", "b"), ("", "")]) == "a  b\n"
    assert aligned([]) == ""


def test_a_number_of_bytes_is_below_1000_of_its_unit_and_right():
    draw = random.Random(0)
    counts = [999, 999.4, 999.6, 1000, 999_499, 999_500, 999_600, 10**15 - 1, 10**18]
    counts += [10 ** draw.uniform(0, 17) for _ in range(5000)]
    counts += [k * 1000**unit for unit in range(5) for k in (1, 999, 999.5, 999.6)]
    for count in counts:
        number, unit = re.fullmatch(r"([\d,]+(?:\.\d+)?) (B|[kMGT]B)", format_bytes(count)).groups()
        value = float(number.replace(",", ""))
        assert value < 1000 or unit == "TB", count
        meant = value * 1000 ** ("B", "kB", "MB", "GB", "TB").index(unit)
        assert math.isclose(meant, count, rel_tol=0.006, abs_tol=0.51), count
    assert format_bytes(999_600) == "1 MB"


def test_a_note_is_one_write(monkeypatch):
    """Launchers mix the output of ranks between two writes, even if PYTHONUNBUFFERED is set."""
    writes = []

    class Unbuffered(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            writes.append(bytes(data))
            return len(data)

    unbuffered = io.TextIOWrapper(Unbuffered(), "utf-8", write_through=True)
    monkeypatch.setattr(sys, "stderr", unbuffered)
    print_note("the loss of node 1 is nan")
    written = [data for data in writes if data]  # `print` also writes its empty `end`
    assert written == [b"mpigossip: the loss of node 1 is nan\n"]


def test_a_note_with_several_messages_begins_them_on_the_next_line(capsys):
    print_note(
        JobError(["run.epochs = 0: must be at least 1", "data.batch = 0: must be at least 1"])
    )
    assert capsys.readouterr().err == (
        "mpigossip: several errors:\n"
        "- run.epochs = 0: must be at least 1\n"
        "- data.batch = 0: must be at least 1\n"
    )
