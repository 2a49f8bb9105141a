"""`mpigossip data`: pack image folders and text into HDF5, show packed files."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import command, family, many, tell

EXAMPLES = "mpigossip data pack imagenet imagenet.h5 --image-size 256"
PACK = f"""
{EXAMPLES}
mpigossip data pack cifar10 cifar10.h5 --decoded
mpigossip data pack books books.h5 --text
mpigossip data pack books books.h5 --text --tokenizer bpe --vocabulary 8192
"""


def add(commands) -> None:
    """Add them to the parser."""
    data = family(commands, "data", "pack|show", "image folders and text to HDF5", EXAMPLES)
    pack = command(
        data, "pack", _pack, "pack train/CLASS/*.jpg and test/CLASS/*.jpg into HDF5", PACK
    )
    pack.add_argument("folder", type=Path, metavar="FOLDER", help="of text, also a single file")
    pack.add_argument("out", type=Path, metavar="OUT.h5")
    pack.add_argument("--image-size", type=many, help="shorter side in pixels to resize to")
    pack.add_argument(
        "--decoded", action="store_true",
        help="store pixels: for small images of one size, so that no run decodes them",
    )  # fmt: skip
    pack.add_argument("--text", action="store_true", help="pack text files for a language model")
    pack.add_argument(
        "--tokenizer", default="byte",
        help="byte (default), or bpe: byte-pair encoding learned from the text (needs tokenizers)",
    )  # fmt: skip
    pack.add_argument(
        "--vocabulary", type=int, default=4096, help="entries of a bpe: 257 to 65536 (4096)"
    )
    show = command(
        data, "show", _show, "say what a packed file holds", "mpigossip data show imagenet.h5"
    )
    show.add_argument("file", type=Path, metavar="FILE.h5")


def _pack(options) -> None:
    from mpigossip.store.dataset import pack, show

    pack(
        options.folder, options.out, image_size=options.image_size, decoded=options.decoded,
        text=options.text, tokenizer=options.tokenizer, vocabulary=options.vocabulary,
    )  # fmt: skip
    tell(show(options.out))


def _show(options) -> None:
    from mpigossip.store.dataset import show

    tell(show(options.file))
