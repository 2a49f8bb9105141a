"""Files that are installed with the package: examples, descriptions of sites, batch templates."""

import re
import shutil
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import mpigossip
from mpigossip.config.errors import JobError
from mpigossip.config.toml import near

FOLDERS = ("own", "loops", "loops/recipes", "templates", ".")
"""Folders inside `jobs/` that :func:`copy` searches for the files of an example."""
EXAMPLES = (
    "*.toml",
    "own/*.toml",
    "*/*.sbatch",
    "loops/*.py",
    "loops/recipes/*.py",
    "*.sbatch",
    "*.py",
    "*.sh",
)
"""Patterns of the examples inside `jobs/`; files with the same name are copied together."""


def folders() -> list[Path]:
    """Return the folders that may hold the example files.

    These are `jobs/` next to the package, and the folders into which pip installs data files.
    """
    parent = Path(mpigossip.__file__).parents[1]
    schemes = (sysconfig.get_default_scheme(), "posix_user")
    data = [Path(sysconfig.get_path("data", scheme)) for scheme in schemes]
    return [parent / "jobs", *(top / "share" / "mpigossip" for top in (parent, *data))]


def find(inside: str) -> Path:
    """Return the path of a file or folder inside `jobs/`.

    :param inside: path relative to `jobs/`
    :raises JobError: if none of the :func:`folders` contains this path
    """
    for folder in folders():
        if (folder / inside).exists():
            return folder / inside
    raise JobError(
        f'the file "{inside}" of mpigossip is in none of {", ".join(map(str, folders()))}: '
        "reinstall mpigossip"
    )


def examples(patterns: Sequence[str] = EXAMPLES) -> dict[str, Path]:
    """Return the paths of the example jobs, studies and programs, by name.

    :param patterns: patterns of paths inside `jobs/`
    :raises JobError: if the package was installed without examples
    """
    top = find("digits.toml").parent
    return {path.stem: path for pattern in patterns for path in sorted(top.glob(pattern))}


def given(source: Path | str) -> Path:
    """Return the path of a file: ``source`` is its path, or the name of an example job or study.

    If it is neither, ``source`` is returned as a path.
    """
    path = Path(source)
    if path.suffix or path.parent.name or path.is_file():
        return path
    with suppress(JobError):  # installed without examples
        return examples(EXAMPLES[:1]).get(path.name, path)
    return path


def summary(path: Path) -> str:
    """Return the summary of an example.

    This is the first line of its first comment or docstring, up to a semicolon.
    """
    lines = path.read_text("utf-8").splitlines()
    first = next(line.strip('#" .:') for line in lines if line.startswith(("# ", '"""')))
    return first.partition(";")[0]


def copy(name: str, folder: Path) -> list[Path]:
    """Copy an example and the examples that it imports into a folder, and return the new paths.

    :param name: name of the example
    :param folder: folder to copy to, which is created if necessary
    :raises JobError: if there is no such example, if one of its own files exists in the folder, or
        if the folder or one of its parents is a file
    """
    paths = examples()
    if name not in paths:
        raise JobError(f'example "{name}" is unknown; {near(name, paths)}')
    top = find("digits.toml").parent
    files = [path for inside in FOLDERS for path in (top / inside).glob(f"{name}.*")]
    code = "\n".join(path.read_text("utf-8") for path in files if path.suffix == ".py")
    existing = [folder / path.name for path in files if (folder / path.name).exists()]
    if existing:
        raise JobError(f"{existing[0]} exists already; name another folder with --to FOLDER")
    imports = [
        paths[module] for module in re.findall(r"^from (\w+) import", code, re.M) if module in paths
    ]
    # An imported example may have been copied with another example before. Do not overwrite it.
    files += [path for path in imports if not (folder / path.name).exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise JobError(
            f"--to {folder}: a file with this name exists; give the path of a folder"
        ) from None
    return [Path(shutil.copyfile(path, folder / path.name)) for path in sorted(files)]
