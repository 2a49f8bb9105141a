"""Packed texts: bytes or learned tokens, windows in documents, losses per byte, rejections."""

import sys

import h5py
import numpy as np
import pytest
import torch

from mpigossip.cli import main
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import Data, JobError
from mpigossip.data.sources import source
from mpigossip.models import model
from mpigossip.store import StoreError
from mpigossip.store.dataset import describe, open_dataset, pack
from mpigossip.store.log import read
from mpigossip.training import assemble
from tests.cases import naming
from tests.jobs import train

WORDS = "gossip averages neighbours; größer, “quoted”, 日本語 and a café. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts") / "in"
    root.mkdir()
    (root / "a.txt").write_text(WORDS * 60)
    (root / "b.txt").write_text("".join(f"line {k}: {WORDS[k % 40 :]}\n" for k in range(90)))
    (root / "tiny.txt").write_text("short")
    return root


@pytest.fixture(scope="module")
def bpe(folder):
    pytest.importorskip("tokenizers")
    return pack(folder, folder.parent / "bpe.h5", text=True, tokenizer="bpe", vocabulary=400)


@pytest.fixture(scope="module")
def plain(folder):
    return pack(folder, folder.parent / "byte.h5", text=True)


def test_tokens_decode_to_the_text(folder, bpe, plain):
    from tokenizers import Tokenizer

    with open_dataset(bpe) as data, open_dataset(plain) as byte:
        assert byte.tokenizer.name == "byte" and byte.tokens("train").dtype == np.uint8
        assert data.tokenizer.name.startswith("bpe-400-") and len(data.tokenizer.lengths) == 400
        library = Tokenizer.from_str(data.tokenizer.text.decode())
        for number, path in enumerate(sorted(folder.iterdir())):
            parts = []
            for name in ("train", "test"):
                begin, end = data.split(name).offsets[number : number + 2] // 2
                tokens = data.tokens(name)[begin:end]
                parts.append(library.decode(tokens.tolist()))
                assert data.tokenizer.lengths[tokens].sum() == len(parts[-1].encode())
                # splits end with a character, fewer than 4 bytes from the split of bytes
                assert abs(len(parts[-1].encode()) - len(byte.split(name).encoded(number))) < 4
            assert "".join(parts) == path.read_text()
        assert data.tokens("train").size < 0.5 * byte.tokens("train").size


def test_learning_is_deterministic_and_uses_the_training_text_only(tmp_path, folder):
    pytest.importorskip("tokenizers")
    (tmp_path / "x").write_text("abcd" * 900 + "qz" * 200)  # the last tenth consists of q and z
    names = []
    for out in ("one.h5", "two.h5"):
        path = pack(tmp_path / "x", tmp_path / out, text=True, tokenizer="bpe", vocabulary=260)
        with open_dataset(path) as data:
            names.append(data.tokenizer.name)
            assert b"qz" not in data.tokenizer.text and b"abcd" in data.tokenizer.text
    assert names[0] == names[1]


def test_windows_cross_documents_or_stay_within_them(bpe, plain):
    for path in (bpe, plain):
        with open_dataset(path) as data:
            text = data.tokens("train")
            ends = data.train.offsets // data.tokenizer.width
        joined, separate = (
            source(Data(source=str(path), context=16, windows=windows), 0)
            for windows in ("joined", "apart")
        )
        assert joined.train_size == (len(text) - 1) // 16
        assert separate.train_size == sum((n - 1) // 16 for n in np.diff(ends) if n)
        tenth = source(Data(source=str(path), context=16, every=10), 0)
        assert tenth.train_size == -(-joined.train_size // 10)
        assert tenth.test_size == joined.test_size
        assert np.array_equal(
            tenth.raw("train", np.array([2])), joined.raw("train", np.array([20]))
        )
        x, y = joined.make_batch("train", np.array([0, 3]), (0, 0))
        assert np.array_equal(x[1], text[48:64].astype(int)) and torch.equal(x[:, 1:], y[:, :-1])
        every = separate.raw("train", np.arange(separate.train_size))
        count = 0
        for number in range(len(ends) - 1):
            in_document = every[separate.train_labels == number]
            document = text[ends[number] : ends[number + 1]]
            for k, window in enumerate(in_document):
                assert np.array_equal(window, document[16 * k : 16 * k + 17])
            count += len(in_document)
        assert count == len(every)
        assert set(separate.train_labels) == {0, 1}, "the tiny document must have no window"


def job(path, folder, *settings):
    base = {
        "task": {"name": "language-model"},
        "model": {"name": "gpt", "layers": 1, "heads": 2, "width": 16},
    }
    return assemble.load(
        base,
        [
            f"data.source={path}",
            "data.context=16",
            "data.batch=4",
            f"run.output={folder}",
            "run.steps=6",
            "algorithm.name=dsgd",
            "schedule.scale=none",
            *settings,
        ],
    )


def test_losses_are_logged_per_byte(bpe, plain, tmp_path):
    results = {}
    for path in (bpe, plain):
        results[path] = train(job(path, tmp_path / path.stem), 2)
    assert results[plain]["nats_per_byte"] == results[plain]["loss"]
    data = source(Data(source=str(bpe), context=16), 0)
    _, targets = data.make_batch("test", np.arange(data.test_size))
    per_token = data.tokenizer.lengths[targets].mean()
    assert results[bpe]["nats_per_byte"] == pytest.approx(
        results[bpe]["loss"] / per_token, rel=1e-9
    )
    log = read(tmp_path / bpe.stem / "log.h5")
    assert log.evaluations["nats_per_byte"][-1] == results[bpe]["nats_per_byte"]
    assert log.steps["nats_per_byte"].shape == (6, 2)
    units = set()

    def note(name, item):
        if name.endswith("nats_per_byte"):
            units.add(bytes(item.attrs["units"]))

    with h5py.File(tmp_path / bpe.stem / "log.h5") as file:
        file.visititems(note)
    assert units == {b"nat/byte"}


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (b"", {}, "empty"),
        (b"a", {}, ("x.txt", "too little text")),
        (
            b"ab\xffcd" * 40,
            {"tokenizer": "bpe"},
            ("UTF-8", "0xff at 2", "--tokenizer byte"),
        ),
        ("é".encode() * 90 + b"\xe9\n", {"tokenizer": "bpe"}, ("UTF-8", "0xe9 at 180")),
        (b"abc", {"tokenizer": "words"}, ("--tokenizer 'words'", "byte, bpe")),
        (b"abc", {"tokenizer": "bpe", "vocabulary": 256}, ("--vocabulary 256", "257 to 65536")),
        (
            b"abc",
            {"tokenizer": "bpe", "vocabulary": 70_000},
            ("--vocabulary 70000", "257 to 65536"),
        ),
    ],
)
def test_invalid_texts_and_options_are_rejected(tmp_path, text, more, message):
    if "UTF-8" in message:
        pytest.importorskip("tokenizers")
    (tmp_path / "x.txt").write_bytes(text)
    with pytest.raises(StoreError, match=naming(message)):
        pack(tmp_path / "x.txt", tmp_path / "x.h5", text=True, **more)
    assert not (tmp_path / "x.h5").exists()


def test_without_the_library_the_message_has_a_remedy(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_text("abc" * 50)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(StoreError, match=naming("pip install 'mpigossip[text]'")):
        pack(tmp_path / "x.txt", tmp_path / "x.h5", text=True, tokenizer="bpe")
    assert pack(tmp_path / "x.txt", tmp_path / "x.h5", text=True).exists()


def test_a_tokenizer_is_for_text(tmp_path):
    with pytest.raises(StoreError, match=naming("none", "train/CLASS")):
        pack(tmp_path / "none", tmp_path / "x.h5")
    with pytest.raises(StoreError, match=naming("--tokenizer 'bpe'")):
        pack(tmp_path, tmp_path / "x.h5", tokenizer="bpe")
    with pytest.raises(StoreError, match=naming("--vocabulary 300")):
        pack(tmp_path, tmp_path / "x.h5", text=True, vocabulary=300)


@pytest.mark.parametrize("windows", ["joined", "apart"])
def test_a_window_longer_than_the_text_is_rejected(plain, windows):
    remedy = 'data.windows = "joined"' if windows == "apart" else "smaller"
    with pytest.raises(JobError, match=naming("data.context + 1 = 100001", remedy)):
        source(Data(source=str(plain), context=100_000, windows=windows), 0)


def test_another_tokenizer_and_another_vocabulary_are_rejected(bpe, plain, tmp_path):
    named = Data(source=str(bpe), context=16, tokenizer="bpe-400-00000000")
    with pytest.raises(JobError, match=naming('data.tokenizer = "bpe-400-00000000"', bpe.name)):
        source(named, 0)
    assert source(Data(source=str(plain), context=16, tokenizer="byte"), 0).classes == 256
    small = job(bpe, tmp_path, "model.name=tests.store.test_tokens:bytes_only", "model.layers=none")
    with (
        SingleProcess() as world,
        pytest.raises(JobError, match=naming("model.name", "0 … 399", "index out of range")),
    ):
        assemble.assemble(small, world, 2)


def bytes_only(shape, classes, **_):
    """Build a model for bytes, which ignores the tokens of the data."""
    inside = model("gpt", shape, 256, 0, torch.int64, layers=1, heads=2, width=16)
    return torch.nn.Sequential(inside, torch.nn.Linear(256, classes))


def damaged(path, out, change):
    out.write_bytes(path.read_bytes())
    with h5py.File(out, "r+") as file:
        change(file)
    return out


def test_a_damaged_tokenizer_is_rejected(bpe, tmp_path):
    def letter(file):
        file["tokenizer"][100] ^= 1

    def length(file):
        file["lengths"][300] = 0

    def renamed(file):
        file.attrs["tokenizer"] = np.bytes_("bpe-400-12345678")

    for change, message in (
        (letter, ("its tokenizer", "its attribute")),
        (renamed, ("its attribute", "bpe-400-12345678")),
        (length, ("400 tokens", "1 to 65536")),
    ):
        with pytest.raises(StoreError, match=naming(message)):
            open_dataset(damaged(bpe, tmp_path / "bad.h5", change))


def test_commands_pack_and_show(folder, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    out = str(tmp_path / "out.h5")
    words = ["data", "pack", "--text", str(folder / "a.txt"), out, "--tokenizer", "bpe"]
    assert not main([*words, "--vocabulary", "300"])
    printed = capsys.readouterr().out
    assert (
        "tokenizer bpe-300-" in printed
        and "tokens of" in printed
        and printed.strip() == describe(out)
    )
