"""Texts for packed data sets, with their files, training and test splits, and tokens.

A token is a byte or, with byte-pair encoding, an index into a vocabulary that is learned from the
training splits. An index is stored as two bytes, little-endian. Each entry of the vocabulary stands
for a fixed sequence of bytes, so that losses per byte can be compared between tokenizers. Learning
a vocabulary requires the library `tokenizers`; reading a data set does not.
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

MAX_ENTRIES = 1 << 16
"""Largest number of entries of a vocabulary, since a token has two bytes."""
BYTE_ENTRIES = 256
"""Number of entries of a vocabulary before learning, which is one for each byte."""
KINDS = ("byte", "bpe")


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of a packed text."""

    lengths: np.ndarray
    """Number of bytes of text that each token stands for, (V,) int64."""
    text: bytes = b""
    """Serialized tokenizer, which `tokenizers.Tokenizer.from_str` reads; empty for bytes."""

    @property
    def name(self) -> str:
        """Name of the tokenizer: "byte", or kind, size and checksum, as in "bpe-8192-1c291ca3"."""
        return f"bpe-{len(self.lengths)}-{zlib.crc32(self.text):08x}" if self.text else "byte"

    @property
    def width(self) -> int:
        """Number of bytes of a stored token."""
        return 2 if self.text else 1


BYTES = Tokenizer(np.ones(256, np.int64))


def list_files(where: Path, excluded: Path | None = None) -> tuple[list[Path], list[str]]:
    """Return the files of a text, sorted by path, and their names.

    Empty files and hidden files and folders are left out.

    :param where: a file, or a folder of which all files are taken, including subfolders
    :param excluded: file to leave out, such as the data set itself; None: no file is left out
    :return: paths, and names relative to the folder
    :raises StoreError: if there is no file with text, or a folder cannot be read
    """

    def fail(error: OSError) -> None:
        with reading(Path(error.filename)):
            raise error

    if where.is_file():
        if not where.stat().st_size:
            raise StoreError(f"{where} is empty; name a file or folder with text")
        return [where], [where.name]
    files = sorted(
        path
        for top, _, names in os.walk(where, onerror=fail)
        for path in map(Path(top).joinpath, names)
        if path.is_file()
        and path.stat().st_size > 0
        and not (excluded and excluded.exists() and path.samefile(excluded))
        and not any(part.startswith(".") for part in path.relative_to(where).parts)
    )
    if not files:
        raise StoreError(f"{where} contains no files with text; name another folder")
    return files, [str(path.relative_to(where)) for path in files]


def split_file(path: Path, whole_characters: bool = False) -> tuple[bytes, bytes]:
    """Return the first 90 % of a file's bytes, for training, and the rest, for testing.

    :param path: file to read
    :param whole_characters: whether to move the boundary back to the first byte of a UTF-8
        character, so that the first part is a little shorter
    :raises StoreError: if the file cannot be read
    """
    with reading(path):
        data = path.read_bytes()
    boundary = len(data) * 9 // 10
    while whole_characters and 0 < boundary < len(data) and data[boundary] & 0xC0 == 0x80:
        boundary -= 1
    return data[:boundary], data[boundary:]


def decode(path: Path, data: bytes, begin: int = 0) -> str:
    """Decode bytes as UTF-8 text.

    :param path: file that contains the bytes, for the error message
    :param data: bytes to decode
    :param begin: offset of the bytes in the file
    :raises StoreError: if they are not UTF-8; the message names the offset in the file
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at {begin + error.start}; convert "
            "it (iconv -t UTF-8), omit it, or pack with --tokenizer byte, which accepts any file"
        ) from error


class Coder:
    """Encoder that converts the bytes of files to the tokens of a data set."""

    def __init__(self, kind: str, files: Sequence[Path], vocabulary: int):
        """Prepare the tokenizer; if the kind is "bpe", learn it from the files.

        :param kind: "byte" or "bpe"
        :param files: files of the text
        :param vocabulary: number of entries for "bpe"
        :raises StoreError: if the kind is unknown, or the tokenizer cannot be learned
        """
        if kind not in KINDS:
            raise StoreError(f"--tokenizer {kind!r}: must be one of {', '.join(KINDS)}")
        self.tokenizer = BYTES
        self._library = None
        if kind == "bpe":
            self._library = learn(files, vocabulary)
            entries = sorted(self._library.get_vocab().items(), key=lambda pair: pair[1])
            # Entries are strings over the byte-level alphabet, in which each character is a byte.
            lengths = np.array([len(entry) for entry, _ in entries], np.int64)
            self.tokenizer = Tokenizer(lengths, self._library.to_str().encode())

    def encode_splits(self, path: Path) -> Iterator[bytes]:
        """Yield the tokens of a file's training part and of its test part, as bytes to store.

        :raises StoreError: if the file cannot be read or, with "bpe", is not UTF-8
        """
        begin = 0
        for part in split_file(path, self._library is not None):
            if self._library is None:
                yield part
            else:
                ids = self._library.encode(decode(path, part, begin)).ids
                yield np.array(ids, "<u2").tobytes()
            begin += len(part)


def learn(files: Sequence[Path], vocabulary: int) -> Any:
    """Learn a byte-pair encoding from the training parts of files.

    :param files: files of the text, in UTF-8
    :param vocabulary: number of entries, more than 256 and at most 65,536; a short text gives fewer
    :return: tokenizer of the `tokenizers` library
    :raises StoreError: if the vocabulary is out of range, the library is not installed, or a file
        cannot be read or is not UTF-8
    """
    if not BYTE_ENTRIES < vocabulary <= MAX_ENTRIES:
        raise StoreError(
            f"--vocabulary {vocabulary}: byte-pair encoding begins with {BYTE_ENTRIES} entries, "
            "one for each byte, and stores two bytes per token; give a number from "
            f"{BYTE_ENTRIES + 1} to {MAX_ENTRIES}"
        )
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise StoreError(
            "--tokenizer bpe needs the package tokenizers, which isn't installed; run: pip "
            "install 'mpigossip[text]', or pack with --tokenizer byte"
        ) from error
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (decode(path, split_file(path, True)[0]) for path in files)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
