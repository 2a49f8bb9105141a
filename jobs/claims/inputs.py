"""Input files of the runs, searched graphs and a packed text; each is created at its first use."""

from __future__ import annotations

import hashlib
import shutil
import sys
import sysconfig
from pathlib import Path

from mpigossip.config.errors import Failure
from mpigossip.graphs.search import save, search
from mpigossip.store.packing import pack

TEXT = "166 modules (top level, *.py) of the library of CPython 3.11.7, 4,661,318 bytes"
TEXT_SHA256 = "29e6ffb976cc49b03c7b9ba137bb03fdc3df9083a193c303a1069fb4c85dd19b"
"""SHA-256 of the modules' contents, in the order of their names."""


def searched_graph(folder: Path, nodes: int) -> Path:
    """Return the path of a graph of degree 4 from the topology search.

    If the file does not exist, the search is run, and the file is written.

    :param folder: folder for the file
    :param nodes: number of nodes
    """
    file = folder / f"searched-{nodes}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save(search(nodes, degree=4, evaluations=20_000, seed=0), file)
    return file


def packed_text(folder: Path) -> Path:
    """Return the path of a packed text: the modules of Python's standard library.

    :param folder: folder for the file
    :raises Failure: if the modules of this Python differ from those that the stored runs used
    """
    file = folder / "text.h5"
    if file.exists():
        return file
    modules = folder / "text"
    modules.mkdir(parents=True, exist_ok=True)
    contents = hashlib.sha256()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.stem in sys.stdlib_module_names:
            contents.update(path.read_bytes())
            shutil.copyfile(path, modules / path.name)
    if contents.hexdigest() != TEXT_SHA256:
        raise Failure(
            f"the modules in {sysconfig.get_path('stdlib')} have the SHA-256 "
            f"{contents.hexdigest()}, but the stored runs used {TEXT}, with the SHA-256 "
            f"{TEXT_SHA256}: use Python 3.11.7"
        )
    pack(modules, file, text=True)
    return file
