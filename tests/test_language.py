"""Counts of unclear phrases and names in Python files and pages, which may only become smaller.

tools/docs/contribute.md describes the language of the project; its questions 2, 3 and 6 name these
phrases and names. tests/language.json holds the number of phrases and names in each package, and
the number of phrases in the pages (Markdown) of each folder, whose name ends in "/":

    python -m tests.test_language              print the numbers
    python -m tests.test_language tools        print each match in Python files of the package tools
    python -m tests.test_language tools/docs/  print each match in pages of the folder tools/docs
    python -m tests.test_language --write      write the numbers to tests/language.json
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
# In a page: a block of code, or a span of code in a line or a paragraph.
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)\1(?!`)", re.DOTALL)
# The space between two texts of a page: an empty line, the begin of an item, heading or quotation,
# or the border of a cell of a table.
BORDER = re.compile(
    r"\n[ \t]*\n|^[ \t]*(?:[*+-]|\d+\.)[ \t]+|^#+[ \t]+|^[ \t]*>[ \t]*|\|", re.MULTILINE
)
KINDS = (*PHRASES, "names")


def package(path: Path) -> str:
    """Return the package of a Python file, or the folder of a page, which ends in "/".

    A package is a subpackage of mpigossip, or a folder of the repository.
    """
    folders = path.relative_to(ROOT).parts[:-1]
    if path.suffix == ".md":
        return "/".join((*folders, "")) or "./"
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


def page_texts(page: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, items, headings and cells of tables with their positions, without code."""
    prose = FENCE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), page)
    prose = SPAN.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), prose)
    start = 0
    for border in [*BORDER.finditer(prose), None]:
        text = prose[start : border.start() if border else len(prose)]
        position = start + len(text) - len(text.lstrip())
        yield position, " ".join(re.sub(r"[*\[\]]", "", text).split())
        start = border.end() if border else start


def phrases(located_texts: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Yield position, kind and context of each unclear phrase in texts with their positions."""
    for position, text in located_texts:
        if " " in text:
            for kind, pattern in PHRASES.items():
                for match in pattern.finditer(text):
                    yield position, kind, text[max(match.start() - 30, 0) : match.end() + 30]


def matches(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each unclear phrase, and of each use of an unclear name."""
    positions = [*phrases(texts(source))]
    code = TOKEN.sub(lambda token: re.sub(r"[^\n]", " ", token[0]), source)
    positions += [(match.start(), "names", match[0]) for match in NAMES.finditer(code)]
    for position, kind, shown in positions:
        yield source.count("\n", 0, position) + 1, kind, shown


def page_matches(page: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each unclear phrase in a page."""
    for position, kind, shown in phrases(page_texts(page)):
        yield page.count("\n", 0, position) + 1, kind, shown


def all_matches() -> Iterator[tuple[Path, int, str, str]]:
    """Yield path, line, kind and text of all unclear phrases and names."""
    for folder in ("mpigossip", "jobs", "tools", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != Path(__file__) and not any(
                p[0] == "." for p in path.parts[len(ROOT.parts) :]
            ):
                for match in matches(path.read_text()):
                    yield path, *match
    for path in pages():
        for match in page_matches(path.read_text()):
            yield path, *match


def pages() -> list[Path]:
    """Return the paths of all pages of the repository."""
    folders = ("mpigossip", "jobs", "tools", "tests")
    inside = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.md"))]
    visible = [
        path for path in inside if not any(p[0] == "." for p in path.relative_to(ROOT).parts)
    ]
    return [*sorted(ROOT.glob("*.md")), *visible]


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


def test_phrases_of_a_page_are_counted_outside_of_code():
    page = """
        # Which of these

        Text about `those of code` and ``as many `x` ``, which is beside
        the point. **Where** it ends, one message a step

        * Of a list, else nothing; `two` a step is not counted
        * The same [rank](#those-of)

        | Those of cells | a: What it is |
        |---|---|
        | no: 16 a node | ``|`` |

        ```py
        # Those of a block, else beside it
        ```
        """
    found_on = [(line, kind) for line, kind, _ in page_matches(textwrap.dedent(page))]
    assert sorted(found_on) == [
        (2, "beginnings"),
        (4, "beginnings"),
        (4, "phrases"),
        (4, "phrases"),
        (7, "beginnings"),
        (7, "else"),
        (8, "beginnings"),
        (10, "beginnings"),
        (10, "beginnings"),
        (10, "phrases"),
        (12, "phrases"),
    ]


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
