"""Test tools/data/make_corpus.py on a small tar archive with the layout of a kernel's archive."""

import importlib.util
import io
import tarfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "data" / "make_corpus.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_corpus", TOOL)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "linux-source.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for k in range(60):
            add(
                tar,
                f"linux-source-1/{['drivers', 'net', 'mm', 'fs'][k % 4]}/{k}.c",
                b"int x;\n" * 100,
            )
        add(tar, "linux-source-1/Makefile", b"all:\n" * 100)
        add(tar, "linux-source-1/fs/odd.h", b"\xff" * 700)
        add(tar, "linux-source-1/../../escaped.c", b"int y;\n" * 100)
    return path


def add(tar, name, data):
    one = tarfile.TarInfo(name)
    one.size = len(data)
    tar.addfile(one, io.BytesIO(data))


def test_a_smaller_text_is_part_of_a_larger_one(tool, archive, tmp_path, capsys):
    texts = []
    for megabytes in ("0.007", "0.02", "1"):
        out = tmp_path / megabytes
        tool.main([str(out), "--megabytes", megabytes, "--archive", str(archive)])
        texts.append({path.relative_to(out) for path in out.rglob("*") if path.is_file()})
    assert texts[0] < texts[1] < texts[2] and 9 <= len(texts[0]) <= 10
    assert {path.parts[0] for path in texts[1]} == {"drivers", "net", "mm", "fs"}
    assert len(texts[2]) == 60 and not list(tmp_path.rglob("escaped.c"))
    printed = capsys.readouterr()
    assert "60 files with 0.0 MB" in printed.out and "1 other files" in printed.out
    assert "--megabytes 1:" in printed.err and "0.0 MB" in printed.err
