"""Copy all pages of the repository into one folder, from which Sphinx builds the site.

    python tools/docs/gather.py build/docs-source

Pages of tools/docs are put at the top, other pages keep their paths. Links between pages are
adapted, and other files to which a page links, such as pictures, are copied, too.
"""

import os
import re
import shutil
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HERE = Path("tools/docs")
FOLDERS = ("jobs", "mpigossip", "tests", "tools")
FILES_ONLY = ("tests/double/README.md", "tests/double/MUTANTS.md", "jobs/claims/PROTOCOL.md")
"""Pages that the site leaves out: they describe the test double, the mutants and the protocols."""
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
"""Regular expression for a link in Markdown: bracket, target, section of the page."""


def pages() -> list[Path]:
    """Return the paths of all pages of the site, relative to the root of the repository."""
    paths = [path for folder in FOLDERS for path in sorted((REPO / folder).rglob("*.md"))]
    paths = [path.relative_to(REPO) for path in paths]
    return [path for path in paths if str(path) not in FILES_ONLY]


def path_in_site(path: Path) -> Path:
    """Return the path that a file of the repository has within the site.

    :param path: path of the file, relative to the root of the repository
    """
    return path.relative_to(HERE) if HERE in path.parents else path


def convert_links(page: Path, out: Path) -> str:
    """Return the text of a page with links that are correct in the site.

    Other files to which the page links, such as pictures, are copied into ``out``.

    :param page: path of the page, relative to the root of the repository
    :param out: folder of the site's sources
    """

    def link(match: re.Match) -> str:
        if "://" in match[2] or match[2].startswith(("mailto:", "reference/")):
            return match[0]
        target = Path(os.path.normpath(page.parent / match[2]))
        if str(target) in FILES_ONLY:
            return "]"  # The site does not have it, so remove the link.
        if target.suffix != ".md" and (REPO / target).is_file():
            (out / path_in_site(target)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPO / target, out / path_in_site(target))
        if target == Path("README.md"):  # The site has another first page in its place.
            return f"{match[1]}{os.path.relpath('index.md', path_in_site(page).parent)})"
        if (REPO / target).is_dir():
            target = target / "README.md"
            if not (REPO / target).exists():
                return "]"  # A folder has no page, so remove the link.
        return (
            match[1] + os.path.relpath(path_in_site(target), path_in_site(page).parent) + match[3]
        )

    return LINK.sub(link, (REPO / page).read_text("utf-8"))


def main() -> None:
    """Write all pages to the folder that the command line names."""
    out = Path(sys.argv[1])
    for page in pages():
        file = out / path_in_site(page)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(convert_links(page, out), "utf-8")


if __name__ == "__main__":
    main()
