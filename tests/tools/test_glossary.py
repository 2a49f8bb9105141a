"""The glossary names identifiers that exist, and rejects identifiers that don't."""

import re
from pathlib import Path

from tests.cases import on_each
from tests.test_language import TOKEN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tools/docs/glossary.md").read_text()
CODE = "\n".join(path.read_text() for path in sorted((ROOT / "mpigossip").rglob("*.py")))
IDENTIFIERS = set(re.findall(r"[A-Za-z_]\w*", TOKEN.sub(" ", CODE)))
MODULES = {path.stem for path in (ROOT / "mpigossip").rglob("*.py")}


def identifiers(cell):
    return re.findall(r"`([A-Za-z_]\w*)(?:\(\))?`", cell)


def table(heading):
    """Return the cells of each row of the first table below a heading."""
    section = PAGE[PAGE.index(heading) :]
    rows = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


TERMS = table("# Glossary")
CONCEPTS = table("## One term for each concept")


@on_each("row", CONCEPTS)
def test_each_identifier_of_the_glossary_exists_in_the_code(row):
    concept, term, _ = row
    missing = {*identifiers(concept), *identifiers(term)} - IDENTIFIERS
    assert not missing, f"{missing}: no such identifier in mpigossip/; correct glossary.md"


@on_each("row", CONCEPTS)
def test_no_identifier_that_the_glossary_rejects_exists_in_the_code(row):
    used = set(identifiers(row[2])) & (IDENTIFIERS | MODULES)
    assert not used, f"{used}: the glossary rejects it; use {row[1]}"


def test_each_term_and_each_concept_is_defined_once():
    assert len(TERMS) > 25 and len(CONCEPTS) > 40
    assert sum(len(identifiers(row[1])) for row in CONCEPTS) > 20
    assert sum(len(identifiers(row[2])) for row in CONCEPTS) > 4
    for rows in (TERMS, CONCEPTS):
        names = [row[0] for row in rows]
        assert len(names) == len(set(names))


@on_each("path", re.findall(r"`([a-z]+\.[a-z_]+)`", " ".join(row[1] for row in TERMS)))
def test_each_setting_of_the_glossary_exists(path):
    section, key = path.split(".")
    assert re.search(rf"\b{key}\b", CODE) and f'"{section}"' in CODE
