"""Make a large text for language models from Debian's package of the sources of Linux.

    python tools/data/make_corpus.py corpus --megabytes 200
    mpigossip data pack --text corpus corpus.h5 --tokenizer bpe --vocabulary 8192

The program needs Debian or a derivative, but not root. It downloads the package by `apt-get
download` (linux-source-6.1 has about 140 MB), and selects C files from it. The files are taken in
the order of a checksum of their names: they come from all directories, and a smaller text is part
of a larger one. The license of Linux is GPL-2.0.
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


def chosen(sizes: dict[str, int], limit: int) -> list[str]:
    """Return the names of the selected files, in the order of the checksums of their names.

    :param sizes: size of each file in bytes, by name
    :param limit: largest total size in bytes
    """
    names = []
    total = 0
    for name in sorted(sizes, key=lambda name: (zlib.crc32(name.encode()), name)):
        if total >= limit:
            break
        names.append(name)
        total += sizes[name]
    return names


def members(archive: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
    """Yield the C files in the kernel's tar archive, and their names below its top folder."""
    with tarfile.open(archive, "r|*") as tar:
        for one in tar:
            name = one.name.partition("/")[2]
            if (
                one.isfile()
                and 0 < one.size <= LARGEST
                and name.endswith(SUFFIXES)
                and ".." not in name
            ):
                yield tar, one, name


def write(archive: Path, folder: Path, most: int) -> tuple[int, int, int]:
    """Write the selected files below ``folder``.

    :param archive: tar archive of the kernel
    :param folder: a new folder
    :param most: largest total size in bytes
    :return: numbers of files, of bytes, and of files that were not UTF-8
    """
    wanted = set(chosen({name: one.size for _, one, name in members(archive)}, most))
    files = total = odd = 0
    for tar, one, name in members(archive):
        if name not in wanted:
            continue
        content = tar.extractfile(one)
        data = content.read() if content else b""
        try:
            data.decode()
        except UnicodeDecodeError:
            odd += 1
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files = files + 1
        total = total + len(data)
    return files, total, odd


def fetched(package: str, within: Path) -> Path:
    """Download the package to a folder; return the kernel's tar archive in it."""
    try:
        subprocess.run(["apt-get", "download", package], cwd=within, check=True)
        (deb,) = within.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", deb, within / "out"], check=True)
        return next((within / "out" / "usr" / "src").glob("linux-source-*.tar.*"))
    except (OSError, ValueError, StopIteration, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"--package {package} can't be downloaded ({error}): run `apt-get update` on Debian or "
            "a derivative, pass the name of a package that `apt-cache search '^linux-source'` "
            "prints, or pass --archive with a linux-*.tar.xz that you have"
        ) from None


def main(words: list[str] | None = None) -> None:
    """Write the text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new folder for the text")
    parser.add_argument("--megabytes", type=float, default=200.0, help="size of the text (200)")
    parser.add_argument("--package", default=PACKAGE, help=f"package with the sources ({PACKAGE})")
    parser.add_argument("--archive", type=Path, help="tar archive to use in place of a package")
    options = parser.parse_args(words)
    if options.folder.exists() and any(options.folder.iterdir()):
        raise SystemExit(f"{options.folder} is not empty: name a new folder")
    if options.megabytes <= 0:
        raise SystemExit(f"--megabytes {options.megabytes:g}: must be greater than 0")
    if options.archive and not options.archive.is_file():
        raise SystemExit(f"--archive {options.archive}: there is no such file")
    options.folder.resolve().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.resolve().parent) as within:
        archive = options.archive or fetched(options.package, Path(within))
        options.folder.mkdir(exist_ok=True)
        files, total, odd = write(archive, options.folder, round(options.megabytes * 1e6))
    print(f"{options.folder}: {files} files, {total / 1e6:.1f} MB; {odd} of them were not UTF-8")
    if total < 0.99e6 * options.megabytes:
        print(f"the package has only {total / 1e6:.1f} MB of C files", file=sys.stderr)


if __name__ == "__main__":
    main()
