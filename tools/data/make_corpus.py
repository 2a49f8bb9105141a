"""Make a text for training language models from the C files of Debian's Linux source package.

    python tools/data/make_corpus.py corpus --megabytes 200
    mpigossip data pack --text corpus corpus.h5 --tokenizer bpe --vocabulary 8192

The program needs Debian or a derivative, but not root. It downloads the package by `apt-get
download` (linux-source-6.1 has about 140 MB), and selects C files until they have the requested
size. It takes them in the order of a checksum of their names, so that they come from all
directories, and the files of a smaller text are also part of a larger one. The license of Linux is
GPL-2.0.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "linux-source-6.1"
SUFFIXES = (".c", ".h")
LARGEST = 1 << 18
"""Largest size of a file in bytes. Larger files are skipped, because most of them are generated."""


def select(sizes: dict[str, int], size: int) -> list[str]:
    """Select files in the order of the checksums of their names; return the names.

    :param sizes: size of each file in bytes, by name
    :param size: total size in bytes, which the last selected file reaches or exceeds; if all files
        together are smaller, all are selected
    """
    names = []
    total = 0
    for name in sorted(sizes, key=lambda name: (zlib.crc32(name.encode()), name)):
        if total >= size:
            break
        names.append(name)
        total += sizes[name]
    return names


def members(archive: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
    """Yield each C file of 1 to LARGEST bytes in the kernel's tar archive.

    :return: the open archive, the file's entry in it, and its path below the archive's top folder
    """
    with tarfile.open(archive, "r|*") as tar:
        for entry in tar:
            name = entry.name.partition("/")[2]
            if (
                entry.isfile()
                and 0 < entry.size <= LARGEST
                and name.endswith(SUFFIXES)
                and ".." not in name
            ):
                yield tar, entry, name


def write(archive: Path, folder: Path, size: int) -> tuple[int, int, int]:
    """Select files, and write those that are valid UTF-8 below ``folder``.

    :param archive: tar archive of the kernel
    :param folder: an empty folder
    :param size: total size of the selected files in bytes, see `select`
    :return: number of written files, number of written bytes, and number of selected files that
        were left out because they are not UTF-8
    """
    wanted = set(select({name: entry.size for _, entry, name in members(archive)}, size))
    files = total = not_utf8 = 0
    for tar, entry, name in members(archive):
        if name not in wanted:
            continue
        content = tar.extractfile(entry)
        data = content.read() if content else b""
        try:
            data.decode()
        except UnicodeDecodeError:
            not_utf8 += 1
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files = files + 1
        total = total + len(data)
    return files, total, not_utf8


def download(package: str, within: Path) -> Path:
    """Download and unpack a Debian package; return the path of the kernel's tar archive.

    :param package: name of the package
    :param within: folder for the package and its files
    :raises SystemExit: if the package cannot be downloaded, or contains no such archive
    """
    try:
        subprocess.run(["apt-get", "download", package], cwd=within, check=True)
        (deb,) = within.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", deb, within / "out"], check=True)
        return next((within / "out" / "usr" / "src").glob("linux-source-*.tar.*"))
    except (OSError, ValueError, StopIteration, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"--package {package} cannot be downloaded or unpacked ({error}): run `apt-get update` "
            "on Debian or a derivative, pass the name of a package that `apt-cache search "
            "'^linux-source'` prints, or pass --archive with a file linux-*.tar.xz"
        ) from None


def main(words: list[str] | None = None) -> None:
    """Write the text, and print its size.

    :param words: words of the command line; None: the words of ``sys.argv``
    :raises SystemExit: if an option is invalid, or the package can't be downloaded
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new folder for the text")
    parser.add_argument("--megabytes", type=float, default=200.0, help="size of the text (200)")
    parser.add_argument("--package", default=PACKAGE, help=f"package with the sources ({PACKAGE})")
    parser.add_argument("--archive", type=Path, help="tar archive to use in place of a package")
    options = parser.parse_args(words)
    if options.folder.exists() and any(options.folder.iterdir()):
        raise SystemExit(f"the folder {options.folder} is not empty: pass a new folder")
    if options.megabytes <= 0:
        raise SystemExit(f"--megabytes {options.megabytes:g}: must be greater than 0")
    if options.archive and not options.archive.is_file():
        raise SystemExit(
            f"--archive {options.archive}: the file does not exist; pass the path of a tar "
            "archive, or leave --archive out to download the package"
        )
    options.folder.resolve().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.resolve().parent) as within:
        archive = options.archive or download(options.package, Path(within))
        options.folder.mkdir(exist_ok=True)
        files, total, not_utf8 = write(archive, options.folder, round(options.megabytes * 1e6))
    print(
        f"{options.folder}: {files} files with {total / 1e6:.1f} MB were written; {not_utf8} other "
        "files were left out because they are not UTF-8"
    )
    if total < 0.99e6 * options.megabytes:
        print(
            f"--megabytes {options.megabytes:g}: only {total / 1e6:.1f} MB were written, because "
            "too few of the package's C files are small enough and UTF-8; pass another --package",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
