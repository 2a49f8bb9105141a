"""`mpigossip data`: image folders and text to HDF5, and what a packed file holds."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import command, family

EXAMPLES = "mpigossip data pack imagenet imagenet.h5 --image-size 256"
PACK = f"""
{EXAMPLES}
mpigossip data pack books books.h5 --text
"""


def add(commands) -> None:
    """Add them to the parser."""
    data = family(commands, "data", "pack|show", "image folders and text to HDF5", EXAMPLES)
    pack = command(
        data, "pack", _pack, "pack train/CLASS/*.jpg and test/CLASS/*.jpg into HDF5", PACK
    )
    pack.add_argument("folder", type=Path, metavar="FOLDER")
    pack.add_argument("out", type=Path, metavar="OUT.h5")
    pack.add_argument("--image-size", type=int, help="shorter side in pixels to resize to")
    pack.add_argument("--text", action="store_true", help="pack text files for a language model")
    show = command(
        data, "show", _show, "say what a packed file holds", "mpigossip data show imagenet.h5"
    )
    show.add_argument("file", type=Path, metavar="FILE.h5")


def _pack(options) -> None:
    from mpigossip.store.dataset import pack, show

    pack(options.folder, options.out, image_size=options.image_size, text=options.text)
    print(show(options.out))


def _show(options) -> None:
    from mpigossip.store.dataset import show

    print(show(options.file))
