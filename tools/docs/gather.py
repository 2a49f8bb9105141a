"""Gather the pages of the site: tools/docs at the top, other pages of the tree as they lie.

    python tools/docs/gather.py build/docs-source

Links between pages stay links; files that a page names come along, as pictures or downloads.
"""

import os
import re
import shutil
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HERE = Path("tools/docs")
FOLDERS = ("jobs", "mpigossip", "tests", "tools")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
"""A link: bracket, target, part of the page."""


def pages() -> list[Path]:
    """Return the pages, as paths in the tree."""
    paths = [path for folder in FOLDERS for path in sorted((REPO / folder).rglob("*.md"))]
    return [path.relative_to(REPO) for path in paths]


def place(path: Path) -> Path:
    """Return where a file of the tree lies in the site."""
    return path.relative_to(HERE) if HERE in path.parents else path


def moved(page: Path, out: Path) -> str:
    """Return the text of a page with links that lead to where files lie; copy those it names."""

    def link(match: re.Match) -> str:
        if "://" in match[2] or match[2].startswith(("mailto:", "reference/")):
            return match[0]
        target = Path(os.path.normpath(page.parent / match[2]))
        if target.suffix != ".md" and (REPO / target).is_file():
            (out / place(target)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPO / target, out / place(target))
        if target == Path("README.md"):  # the site's first page stands for it
            return f"{match[1]}{os.path.relpath('index.md', place(page).parent)})"
        if (REPO / target).is_dir():
            target = target / "README.md"
            if not (REPO / target).exists():
                return "]"  # a folder has no page
        return match[1] + os.path.relpath(place(target), place(page).parent) + match[3]

    return LINK.sub(link, (REPO / page).read_text("utf-8"))


def main() -> None:
    """Write all pages into the folder that is given."""
    out = Path(sys.argv[1])
    for page in pages():
        file = out / place(page)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(moved(page, out), "utf-8")


if __name__ == "__main__":
    main()
