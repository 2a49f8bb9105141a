"""Counts of unclear phrases and names in Python files, which may only become smaller.

tools/docs/contribute.md describes the language of the project; its questions 2, 3 and 6 name these
phrases and names. tests/language.json holds their number for each package:

    python -m tests.test_language             print the numbers
    python -m tests.test_language tools       print each place in the package tools
    python -m tests.test_language --write     write the numbers to tests/language.json
"""

import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("language.json")
WRITE = "python -m tests.test_language --write"

# Phrases of sentences. A word of the second group may be correct; its count may still not grow.
PHRASES = {
    "beginnings": re.compile(
        r"(?:^|(?<=[.!?:;] ))(?:What|Which|Where|Whether|Of|Those|All that|The same)\b(?=[ ,])"
    ),
    "else": re.compile(r", else\b"),
    "phrases": re.compile(
        r"\b(?:that of|those of|so many|as many|anew|beside)\b"
        r"|(?:\d|\b(?:one|two|three|four|several|ranks?|nodes?|devices?|GPUs?|cores?|threads?"
        r"|process|processes|bytes|[KMG]B|messages?|vectors?|samples?|milliseconds|seconds?|ms))"
        r" a (?:slot|node|rank|host|step|round|fragment|second)\b",
        re.IGNORECASE,
    ),
}
NAMES = re.compile(r"\b_*(?:told|found|whom|beside|among|apart|aside|mine)_*\b")
# Strings and comments. The module tokenize would take ten times as long.
TOKEN = re.compile(
    r"#(?P<comment>.*)"
    r"|(?:\b[rbfuRBFU]{1,2})?(?:"
    r"(?P<q>\"{3}|'{3})(?P<triple>(?:[^\\]|\\(?:.|\n))*?)(?P=q)"
    r"|(?P<p>[\"'])(?P<single>(?:[^\\\n]|\\(?:.|\n))*?)(?P=p))",
)
KINDS = (*PHRASES, "names")


def package(path: Path) -> str:
    """Return the package of a file: a subpackage of mpigossip, or a folder of the repository."""
    folders = path.relative_to(ROOT).parts[:-1]
    return "/".join(folders[:2] if folders[0] == "mpigossip" else folders[:1])


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield strings and comments with their positions.

    Comments on consecutive lines are one text, and so are strings without a token between them.
    """
    kind = text = ""
    start = end = 0
    for token in TOKEN.finditer(source):
        new_kind = "comment" if token["comment"] is not None else "string"
        new_text = token["comment"] if new_kind == "comment" else token["triple"] or token["single"]
        if new_kind != kind or source[end : token.start()].strip():
            yield start, " ".join(text.split())
            kind, text, start = new_kind, "", token.start()
        text += f" {new_text}" if kind == "comment" else new_text or ""
        end = token.end()
    yield start, " ".join(text.split())


def matches(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each unclear phrase, and of each use of an unclear name."""
    places = []
    for position, text in texts(source):
        if " " in text:
            for kind, pattern in PHRASES.items():
                for match in pattern.finditer(text):
                    shown = text[max(match.start() - 30, 0) : match.end() + 30]
                    places.append((position, kind, shown))
    code = TOKEN.sub(lambda token: re.sub(r"[^\n]", " ", token[0]), source)
    places += [(match.start(), "names", match[0]) for match in NAMES.finditer(code)]
    for position, kind, shown in places:
        yield source.count("\n", 0, position) + 1, kind, shown


def all_matches() -> Iterator[tuple[Path, int, str, str]]:
    """Yield path, line, kind and text of all unclear phrases and names."""
    for folder in ("mpigossip", "jobs", "tools", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != Path(__file__) and not any(
                p[0] == "." for p in path.parts[len(ROOT.parts) :]
            ):
                for match in matches(path.read_text()):
                    yield path, *match


def count() -> dict[str, dict[str, int]]:
    """Return the number of matches by package and kind, without zeros."""
    counts = Counter((package(path), kind) for path, _, kind, _ in all_matches())
    table: dict[str, dict[str, int]] = {}
    for name, kind in sorted(counts, key=lambda pair: (pair[0], KINDS.index(pair[1]))):
        table.setdefault(name, {})[kind] = counts[name, kind]
    return table


def test_unclear_phrases_and_names_become_fewer():
    table = json.loads(TABLE.read_text())
    counts = count()
    grown, lowered = [], []
    for name in sorted({*table, *counts}):
        for kind in KINDS:
            old, new = (numbers.get(name, {}).get(kind, 0) for numbers in (table, counts))
            if new > old:
                grown.append(f"{name}: {new} {kind} instead of {old}")
            elif new < old:
                lowered.append(f"{name}: {new} {kind} instead of {old}")
    assert not grown, (
        f"unclear phrases or names were added: {'; '.join(grown)}. To see each of them, run"
        " `python -m tests.test_language PACKAGE`; contribute.md says what to write instead."
    )
    assert not lowered, f"there are fewer now ({'; '.join(lowered)}): run `{WRITE}`"


def test_each_kind_of_phrase_and_name_is_counted():
    program = '''
        """Which of these? Where found, text; one message a step.

        Somewhere else. The same for others. ``a, b, else c``.
        """
        # Those of a comment go on
        # in its next line, beside it.
        def told(_found, key="Of"):
            mine = f"as many {_found} as 'told'. " "Whether so"  # What?
            return mine, '# "beside it"'
        '''
    counts = Counter(kind for _, kind, _ in matches(textwrap.dedent(program)))
    assert counts == {"beginnings": 5, "else": 1, "phrases": 5, "names": 4}


def main(arguments: list[str]) -> int:
    """Print or write the numbers, or print each match of the packages that are named."""
    if arguments == ["--write"]:
        rows = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in count().items())
        TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    elif arguments:
        for path, line, kind, text in all_matches():
            if package(path) in arguments:
                print(f"{path.relative_to(ROOT)}:{line}: {kind}: {text}")
    else:
        for name, row in count().items():
            print(name, *(f"{kind} {number}" for kind, number in row.items()), sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
