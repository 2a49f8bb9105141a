"""Texts for packing: files, training and test halves, tokens.

A token is a byte, or (byte-pair encoding) two bytes, little-endian, that number an entry of a
vocabulary learned from the training halves. Each entry is a fixed sequence of bytes, so that losses
per byte compare between tokenizers. Learning takes the `tokenizers` library; reading doesn't.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpigossip.store import StoreError
from mpigossip.store.hdf5 import reading

MOST = 1 << 16
"""Entries of a vocabulary: a token is two bytes."""
LEAST = 256
KINDS = ("byte", "bpe")


@dataclass(frozen=True)
class Tokenizer:
    """Tokens of a packed text: their lengths, and the vocabulary."""

    lengths: np.ndarray
    """(V,) int64: the bytes of text that each token stands for."""
    text: bytes = b""
    """of `tokenizers`, as `Tokenizer.from_str` takes it; empty for bytes"""

    @property
    def name(self) -> str:
        """Kind, entries and a checksum: "byte", or "bpe-8192-1c291ca3"."""
        return f"bpe-{len(self.lengths)}-{zlib.crc32(self.text):08x}" if self.text else "byte"

    @property
    def width(self) -> int:
        """Bytes of a stored token."""
        return 2 if self.text else 1


BYTES = Tokenizer(np.ones(256, np.int64))


def files_of(where: Path, apart: Path | None = None) -> tuple[list[Path], list[str]]:
    """The file, or all files with text below a folder but for ``apart``, sorted, and their names.

    StoreError.
    """

    def refused(error: OSError) -> None:
        with reading(Path(error.filename)):
            raise error

    if where.is_file():
        if not where.stat().st_size:
            raise StoreError(f"{where} is empty; name a file or folder with text")
        return [where], [where.name]
    files = sorted(
        path
        for top, _, names in os.walk(where, onerror=refused)
        for path in map(Path(top).joinpath, names)
        if path.is_file()
        and path.stat().st_size > 0
        and not (apart and apart.exists() and path.samefile(apart))
        and not any(part.startswith(".") for part in path.relative_to(where).parts)
    )
    if not files:
        raise StoreError(f"{where} holds no files with text in them")
    return files, [str(path.relative_to(where)) for path in files]


def halves(path: Path, whole_letters: bool = False) -> tuple[bytes, bytes]:
    """The first 90 % of a file's bytes, and the rest.

    ``whole_letters``: the cut is moved back to the begin of a letter of UTF-8.
    """
    with reading(path):
        data = path.read_bytes()
    at = len(data) * 9 // 10
    while whole_letters and 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return data[:at], data[at:]


def letters(path: Path, data: bytes, begin: int = 0) -> str:
    """The text of bytes that lie at ``begin`` of a file. StoreError where they aren't UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at {begin + error.start}; convert "
            "it (iconv -t UTF-8), leave it out, or pack with --tokenizer byte, which takes any file"
        ) from error


class Coder:
    """Makes a pack's tokens of the bytes of files."""

    def __init__(self, kind: str, files: Sequence[Path], vocabulary: int):
        """``kind``: one of KINDS; "bpe" learns ``vocabulary`` entries of ``files``. StoreError."""
        if kind not in KINDS:
            raise StoreError(f"tokenizer {kind!r} is unknown; choose one of {', '.join(KINDS)}")
        self.tokenizer = BYTES
        self._library = None
        if kind == "bpe":
            self._library = learned(files, vocabulary)
            entries = sorted(self._library.get_vocab().items(), key=lambda pair: pair[1])
            # of the byte-level alphabet, in which each letter is a byte
            lengths = np.array([len(entry) for entry, _ in entries], np.int64)
            self.tokenizer = Tokenizer(lengths, self._library.to_str().encode())

    def halves(self, path: Path) -> Iterator[bytes]:
        """The tokens of a file's two halves, as they are stored."""
        begin = 0
        for half in halves(path, self._library is not None):
            if self._library is None:
                yield half
            else:
                ids = self._library.encode(letters(path, half, begin)).ids
                yield np.array(ids, "<u2").tobytes()
            begin += len(half)


def learned(files: Sequence[Path], vocabulary: int) -> Any:
    """Byte-pair encoding of the training halves, by the `tokenizers` library. StoreError."""
    if not LEAST < vocabulary <= MOST:
        raise StoreError(
            f"vocabulary {vocabulary} is out of reach: byte-pair encoding begins with {LEAST} "
            f"bytes and numbers tokens in two, so give {LEAST + 1} to {MOST}"
        )
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise StoreError(
            "tokenizer bpe needs the package tokenizers, which isn't here; install it with: pip "
            "install 'mpigossip[text]', or pack with --tokenizer byte"
        ) from error
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (letters(path, halves(path, True)[0]) for path in files)
    made.train_from_iterator(texts, trainer)
    return made
