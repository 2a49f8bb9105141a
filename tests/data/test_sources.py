"""Sources, augmentation, partitions, the sample order and the loader."""

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mpigossip.config import Data, JobError
from mpigossip.data.base import Batch, JobData, Request, SampleError
from mpigossip.data.images import (
    CACHE_LIMIT,
    PAD,
    Images,
    Recipe,
    centre_box,
    crop_flip,
    moves,
    random_box,
    resample,
)
from mpigossip.data.loader import DataError, DeviceCopier, Loader
from mpigossip.data.partition import orders, partition
from mpigossip.data.philox import CROP, ORDER, permutation, philox, words
from mpigossip.data.sources import Source, SyntheticSource, source
from mpigossip.store import StoreError
from mpigossip.store.dataset import pack
from tests.cases import naming, on_each


def packed(root: Path, classes: str, train: int, test: int, image, suffix: str) -> Path:
    """Pack ``train`` and ``test`` images per class, each made by ``image()``."""
    for split, count in (("train", train), ("test", test)):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                image().save(folder / f"{number}.{suffix}")
    return pack(root, root / "out.h5")


@pytest.fixture(scope="module")
def varied(tmp_path_factory) -> Path:
    """Packed images of different sizes, 2 classes, 24 + 10."""
    rng = np.random.default_rng(0)

    def image():
        height, width = rng.integers(40, 80, 2)
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        return coarse.resize((int(width), int(height)), 2)

    return packed(tmp_path_factory.mktemp("varied"), "ab", 12, 5, image, "jpg")


@pytest.fixture(scope="module")
def square(tmp_path_factory) -> Path:
    """Packed PNG images of 16x16 pixels, 3 classes, 30 + 9."""
    rng = np.random.default_rng(1)

    def image():
        return Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))

    return packed(tmp_path_factory.mktemp("square"), "abc", 10, 3, image, "png")


@pytest.fixture(autouse=True)
def loading(forked) -> None:
    """Fork loading processes in all tests of this file."""


@pytest.fixture
def opened():
    """Return a function that opens a source by a seed and fields of Data; close all sources."""
    sources: list[Source] = []

    def make(seed: int = 0, **fields) -> Source:
        sources.append(source(Data(**fields), seed))
        return sources[-1]

    yield make
    for one in sources:
        one.close()


# random numbers


@on_each(
    ("counter", "key", "expected"),
    [  # known answers of Random123, the library of the paper: tests/kat_vectors
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert " ".join(f"{int(word):08x}" for word in philox(counter, key)[:, 0]) == expected


def test_words_depend_on_every_argument():
    indices = np.arange(1000)
    base = words(7, CROP, indices, 3, 1)
    assert base.shape == (4, 1000) and abs(base.mean() / 2**32 - 0.5) < 0.02
    for other in (
        words(8, CROP, indices, 3, 1),
        words(7, ORDER, indices, 3, 1),
        words(7, CROP, indices + 1000, 3, 1),
        words(7, CROP, indices, 4, 1),
        words(7, CROP, indices, 3, 2),
        words(7 + 2**32, CROP, indices, 3, 1),
    ):
        assert (other != base).mean() > 0.99
    assert (words(7, CROP, indices[5:6], 3, 1) == base[:, 5:6]).all()
    assert sorted(permutation(100, 1, ORDER).tolist()) == list(range(100))


# augmentation


def test_crop_flip_draws_every_offset_and_both_sides():
    image = np.arange(1, 65, dtype=np.uint8).reshape(1, 1, 8, 8)
    padded = np.pad(image[0, 0], PAD)
    expected = {
        padded[top : top + 8, left : left + 8][:, ::step].tobytes()
        for top in range(2 * PAD + 1)
        for left in range(2 * PAD + 1)
        for step in (1, -1)
    }
    got = crop_flip(np.repeat(image, 2000, 0), moves(2000, seed=0, epoch=0))
    assert {one.tobytes() for one in got} == expected


def test_random_boxes_follow_the_protocol():
    boxes = [random_box(60, 40, index, seed=0, epoch=2) for index in range(500)]
    for (left, top, right, bottom), _ in boxes:
        assert 0 <= left < right <= 60 and 0 <= top < bottom <= 40
        wide = right - left
        high = bottom - top
        assert wide * high >= 0.07 * 2400 and 0.7 < wide / high < 1.43
    areas = [(box[2] - box[0]) * (box[3] - box[1]) / 2400 for box, _ in boxes]
    assert 0.3 < np.mean(areas) < 0.6
    assert 200 < sum(mirror for _, mirror in boxes) < 300
    box, _ = random_box(
        1000, 10, 0, seed=0, epoch=0
    )  # If no attempt fits, the box is centred and has the ratio 4/3.
    assert box[1] == 0 and box[3] == 10 and 7 <= box[2] - box[0] <= 13


def test_resample_keeps_whole_images_and_mirrors():
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    same = resample(image, (0, 0, 12, 12), (12, 12), False)
    assert (same == pixels.transpose(2, 0, 1)).all()
    mirrored = resample(image, (0, 0, 12, 12), (12, 12), True)
    assert (mirrored == same[:, :, ::-1]).all()
    assert centre_box(20, 10, 0.5) == (7.5, 2.5, 12.5, 7.5)


# sources


def test_digits(opened):
    digits = opened()
    assert (digits.classes, digits.shape, digits.test_size) == (10, (1, 8, 8), 360)
    inputs, targets = digits.make_batch("train", np.arange(1437), (0, 0))
    assert inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert abs(inputs.mean()) < 1e-5 and abs(inputs.std() - 1) < 1e-3
    assert (targets.numpy() == digits.train_labels).all()
    bigger = opened(image_size=16)
    assert bigger.make_batch("test", np.arange(3))[0].shape == (3, 1, 16, 16)


def test_synthetic_is_learnable_and_reproducible(opened):
    fields = {"source": "synthetic", "shape": (3, 8, 8), "classes": 4, "samples": 400}
    data = opened(**fields)
    again = opened(**fields)
    other = opened(1, **fields)
    x, y = data.make_batch("train", np.arange(400), (0, 0))
    assert torch.equal(x, again.make_batch("train", np.arange(400), (5, 9))[0])
    assert not torch.equal(x, other.make_batch("train", np.arange(400), (0, 0))[0])
    assert len({row.numpy().tobytes() for row in x}) == 400
    means = torch.stack([x[y == label].mean(0) for label in range(4)]).flatten(1)
    test, labels = data.make_batch("test", np.arange(data.test_size))
    near = torch.cdist(test.flatten(1), means).argmin(1)
    assert (near == labels).float().mean() > 0.95
    assert not torch.equal(test[:4], x[:4])
    with pytest.raises(JobError, match=naming('data.augment = "crop-flip"', '"none"')):
        source(Data(**fields, augment="crop-flip"), 0)


def test_packed_images_equal_the_stored_files(square, opened):
    data = opened(source=str(square))
    assert data.shape == (3, 16, 16) and data.classes == 3
    stored = sorted((square.parent / "train").glob("*/*"))
    pixels = np.stack([np.asarray(Image.open(path)).transpose(2, 0, 1) for path in stored])
    indices = np.array([29, 3, 3, 12])
    inputs, targets = data.make_batch("train", indices, (0, 0))
    assert targets.tolist() == [2, 0, 0, 1]
    with np.errstate(all="raise"):
        facts = data.images.data
        expected = pixels[indices] / 255 - facts.mean[:, None, None]
        expected /= facts.std[:, None, None]
    np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-5)


@on_each("augment", ["none", "crop-flip", "resized-crop"])
def test_images_packed_as_pixels_give_the_same_batches(square, opened, tmp_path, augment):
    pixels = pack(square.parent, tmp_path / f"{augment}.h5", decoded=True)
    one, other = (
        opened(source=str(path), augment=augment, image_size=16) for path in (square, pixels)
    )
    indices = np.array([29, 3, 3, 12])
    images, pixels = (each.make_batch("train", indices, (3, 1)) for each in (one, other))
    assert all(map(torch.equal, images, pixels))
    images, pixels = (each.make_batch("test", np.arange(9)) for each in (one, other))
    assert torch.equal(images[0], pixels[0])


@on_each("augment", ["none", "crop-flip", "resized-crop"])
def test_cache_and_order_of_calls_do_not_change_batches(varied, opened, augment):
    sources = [
        opened(source=str(varied), augment=augment, image_size=32, cache=cache)
        for cache in ("always", "never", "auto")
    ]
    assert [one.in_memory for one in sources] == [True, False, True]
    indices = np.array([5, 1, 20, 1])
    first = [one.make_batch("train", indices, (3, 1))[0] for one in sources]
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2])
    alone = sources[0].make_batch("train", indices[2:3], (3, 1))[0]
    assert torch.equal(alone, first[0][2:3])  # independent of the other samples of the batch
    assert torch.equal(sources[0].make_batch("train", indices, (3, 1))[0], first[0])
    changed = sources[0].make_batch("train", indices, (3, 2))[0]
    assert torch.equal(changed, first[0]) == (augment == "none")
    tests = [one.make_batch("test", np.arange(10))[0] for one in sources]
    assert torch.equal(tests[0], tests[1]) and tests[0].shape == (10, 3, 32, 32)


def test_cache_limit(square):
    assert CACHE_LIMIT == 2**30
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpigossip.data.images.CACHE_LIMIT", 39 * 768 - 1)
        images = Images(Recipe(str(square), "none", None, "auto"))
        assert not images.cached
        images.close()
        patch.setattr("mpigossip.data.images.CACHE_LIMIT", 39 * 768)
        images = Images(Recipe(str(square), "none", None, "auto"))
        assert images.cached
        images.close()
        images.close()


def test_text(tmp_path, opened):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a").write_bytes(bytes(range(200)) * 10)
    (folder / "b").write_bytes(b"y" * 1000)
    data = opened(source=str(pack(folder, tmp_path / "out.h5", text=True)))
    assert (data.classes, data.shape, data.dtype) == (256, (128,), torch.int64)
    assert len(data.train_labels) == (1800 + 900 - 1) // 128 and data.test_size == 2
    inputs, targets = data.make_batch("train", np.array([1, 20]), (0, 0))
    assert inputs.shape == targets.shape == (2, 128)
    assert inputs[0].tolist() == [(128 + k) % 200 for k in range(128)]
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    assert data.train_labels[14] == 0 and data.train_labels[15] == 1
    with pytest.raises(JobError, match=naming('data.augment = "crop-flip"', "out.h5")):
        source(Data(source=str(tmp_path / "out.h5"), augment="crop-flip"), 0)
    inside = [pack(folder, folder / "inside.h5", text=True).stat().st_size for _ in range(2)]
    assert inside[0] == inside[1], "an earlier pack in the folder is not packed"
    (folder / "inside.h5").unlink()
    (folder / "b").unlink()
    (folder / "a").write_bytes(b"short")
    short = pack(folder, tmp_path / "short.h5", text=True)
    with pytest.raises(JobError, match=naming("short.h5", "data.context")):
        source(Data(source=str(short)), 0)


@on_each(
    ("name", "options", "message"),
    [
        ("cifar.h5", {}, ('"cifar.h5"', '"digits"', "file")),
        ("text.h5", {}, ("text.h5", "HDF5")),
        ("varied.h5", {}, ("pixels", "data.image_size")),
        (
            *("varied.h5", {"augment": "resized-crop"}),
            ('data.augment = "resized-crop"', "data.image_size"),
        ),
    ],
)
def test_problems_in_the_data_section_are_reported(tmp_path, varied, name, options, message):
    """There is no cifar.h5, text.h5 is no HDF5 file, and images of varied.h5 have several sizes."""
    (tmp_path / "text.h5").write_text("no")
    path = {"text.h5": tmp_path / name, "varied.h5": varied}.get(name, name)
    with pytest.raises((JobError, StoreError), match=naming(message)):
        source(Data(source=str(path), **options), 0)


# partitions and order

LABELS = np.random.default_rng(0).integers(0, 10, 1003)


@on_each("kind", ["shuffled", "sorted", "mixed", "dirichlet"])
@on_each("n", [1, 2, 7, 64, 1003])
def test_partition_is_a_partition(kind, n):
    parts = partition(LABELS, n, kind, 3, shuffled_percent=50, alpha=0.1)
    sizes = [len(part) for part in parts]
    assert len(parts) == n and max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(1003))
    again = partition(LABELS, n, kind, 3, shuffled_percent=50, alpha=0.1)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def spread(parts) -> float:
    """Return the mean number of classes that make up nine tenths of a node's samples."""
    counts = [np.sort(np.bincount(LABELS[part], minlength=10))[::-1] for part in parts]
    return float(np.mean([(np.cumsum(c) < 0.9 * c.sum()).sum() + 1 for c in counts]))


def test_partitions_have_the_expected_heterogeneity():
    by = {kind: partition(LABELS, 8, kind, 0) for kind in ("shuffled", "sorted")}
    assert spread(by["shuffled"]) > 7.5 and spread(by["sorted"]) <= 3
    assert (np.diff(LABELS[np.concatenate(by["sorted"])]) >= 0).all()
    half = partition(LABELS, 8, "mixed", 0, shuffled_percent=50)
    assert spread(half[:4]) > 3.5 and spread(half[5:]) <= 3
    none = partition(LABELS, 8, "mixed", 0, shuffled_percent=0)
    assert all((a == b).all() for a, b in zip(none, by["sorted"], strict=True))
    assert spread(partition(LABELS, 8, "mixed", 0, shuffled_percent=100)) > 7.5
    spreads = [spread(partition(LABELS, 8, "dirichlet", 0, alpha=a)) for a in (0.001, 0.3, 100.0)]
    assert spreads[0] < 3.5 < spreads[1] < spreads[2] and spreads[2] > 7.5
    assert not (partition(LABELS, 8, "shuffled", 1)[0] == by["shuffled"][0]).all()


@on_each(
    ("kind", "begin", "batch"),
    [
        ("shuffled", [785, 545, 127, 713], [203, 396, 198, 166]),
        ("sorted", [650, 656, 664, 677], [493, 307, 945, 238]),
        ("mixed", [325, 78, 302, 417], [493, 307, 945, 238]),
        ("dirichlet", [5, 6, 7, 8], [532, 471, 297, 444]),
    ],
)
def test_partitions_and_orders_never_change(kind, begin, batch):
    """A run that is resumed years later continues with the same samples."""
    parts = partition(LABELS, 4, kind, 3, shuffled_percent=50, alpha=0.1)
    assert parts[1][:4].tolist() == begin
    assert orders(parts, 5, batch=4)[2].batch_indices(70).tolist() == batch


def test_more_nodes_than_samples():
    with pytest.raises(JobError, match=naming("1004 nodes", "1003")):
        partition(LABELS, 1004, "shuffled")


def test_order_is_a_function_of_seed_epoch_node():
    parts = partition(LABELS, 4, "shuffled", 0)
    nodes = orders(parts, 5, batch=32)
    assert [node.steps_per_epoch for node in nodes] == [7] * 4
    for node, part in zip(nodes, parts, strict=True):
        first = np.concatenate([node.batch_indices(step) for step in range(7)])
        assert len(set(first.tolist())) == 224 and set(first.tolist()) <= set(part.tolist())
        second = np.concatenate([node.batch_indices(step) for step in range(7, 14)])
        assert not (first == second).all() and node.epoch(6) == 0 and node.epoch(7) == 1
    resumed = orders(parts, 5, batch=32)[2]
    for step in (12, 3, 12, 100):  # Steps may be requested in any order.
        assert (resumed.batch_indices(step) == nodes[2].batch_indices(step)).all()
    other = orders(parts, 6, batch=32)[2]
    assert not (other.batch_indices(3) == nodes[2].batch_indices(3)).all()
    same_part = [parts[0], parts[0]]
    two = orders(same_part, 5, batch=32)
    assert not (two[0].batch_indices(0) == two[1].batch_indices(0)).all()
    with pytest.raises(JobError, match=naming("250", "256")):
        orders(parts, 0, batch=256)


# loader


def fetched(loader, steps) -> list[torch.Tensor]:
    return [batch.inputs for step in steps for batch in loader.step(step)]


def loader_of(data: JobData, workers: int, devices=("cpu", "cpu")):
    nodes = orders(partition(data.train_labels, 2, "shuffled"), 1, batch=8)
    return Loader(data, nodes, seed=4, devices=devices, workers=workers, timeout_s=60)


def test_batches_are_bitwise_identical_for_any_number_of_workers(varied, opened):
    fields = {"source": str(varied), "augment": "resized-crop", "image_size": 32}
    with loader_of(opened(**fields), 0) as loader:
        expected = fetched(loader, range(4))
        tests = [batch.inputs for batch in loader.share(1, 3)]
    assert [len(batch) for batch in tests] == [3]
    with loader_of(opened(**fields, cache="never"), 2) as loader:
        assert loader.workers == 2
        got = fetched(loader, range(4))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        again = [batch.inputs for batch in loader.share(1, 3)]
        assert all(torch.equal(a, b) for a, b in zip(again, tests, strict=True))
    loader.close()
    with loader_of(opened(**fields), 2) as loader:
        assert loader.workers == 0
        assert [len(batch) for batch in fetched(loader, [0])] == [4] * 4


class Sleepy(SyntheticSource):
    """Source that is read in another process, where its third batch never arrives."""

    in_memory = False
    name = "sleepy"
    calls = 0

    def raw(self, split, indices, key=()):
        self.calls += 1
        if self.calls == 3:
            time.sleep(600)
        return super().raw(split, indices, key)


def test_a_loading_process_that_ends_or_hangs_is_reported(varied, opened):
    data = opened(source=str(varied), image_size=32, cache="never")
    with loader_of(data, 1) as loader:
        fetched(loader, [0])
        (victim,) = loader._batches._workers
        loader._batches._timeout = 5  # torch does not notice the end of a fork
        victim.kill()
        with pytest.raises(DataError, match=naming("out.h5", "loading process", "node.timeout_s")):
            fetched(loader, range(1, 30))
    assert not victim.is_alive()
    with loader_of(Sleepy((3,), 2, 40, 4, 0), 1, ["cpu"]) as loader:
        fetched(loader, [0])
        loader._batches._timeout = 0.5
        with pytest.raises(DataError, match=naming('"sleepy"', "loading process", "step 1")):
            fetched(loader, [1])


def test_damage_is_reported_by_every_process_that_decodes(varied, tmp_path, opened):
    bad = tmp_path / "bad.h5"
    bad.write_bytes(varied.read_bytes())
    data = opened(source=str(bad), image_size=32, cache="never")
    with bad.open("rb+") as file:
        file.seek(data.images.data.train.start)
        file.write(b"\0" * 200)
    with pytest.raises(StoreError, match=naming("bad.h5", "sample 0")):
        data.make_batch("train", np.array([0]), (0, 0))
    with loader_of(data, 1) as loader, pytest.raises(DataError, match=naming("bad.h5", "sample 0")):
        fetched(loader, range(3))


def test_the_batches_of_the_next_step_are_copied_early(varied, opened, monkeypatch):
    """As with a GPU, batches do not depend on the order of steps; a step raises its own error."""
    data = opened(source=str(varied), image_size=32)
    with loader_of(data, 0) as loader:
        expected = [fetched(loader, [step]) for step in range(6)]
    streams = Streams(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    # a new process is started for each step that is not the next one
    for workers, cache, steps in ((0, "auto", (0, 1, 2, 4, 3, 3)), (1, "never", (1, 2, 0))):
        data = opened(source=str(varied), image_size=32, cache=cache)
        with loader_of(data, workers) as loader:
            loader.early = True
            for copier in loader.copiers:
                copier.stream = streams
            for step in steps:
                for a, b in zip(fetched(loader, [step]), expected[step], strict=True):
                    assert torch.equal(a, b)
                assert list(loader._copies) == [step + 1]


class Streams:
    """Stand-in for CUDA streams that logs all calls in order."""

    def __init__(self, monkeypatch):
        self.log = []
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: self)

    @contextlib.contextmanager
    def on(self, stream):
        self.log.append("on the copy stream")
        yield
        self.log.append("off it")

    def record_event(self):
        self.log.append("event recorded")
        return "event"

    def wait_event(self, event):
        self.log.append(f"compute waits for the {event}")


def test_a_copy_runs_on_its_own_stream_and_the_compute_stream_waits_for_it(monkeypatch):
    """The device is a CPU, and the calls of streams are logged."""
    streams = Streams(monkeypatch)
    copier = DeviceCopier(torch.device("cpu"))
    copier.stream = streams
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(self))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)

    def finish(pair):
        streams.log.append("normalized")
        return Batch(pair[0] * 2, pair[1])

    copy = copier.start_copy((torch.ones(2, 3), torch.zeros(2)), finish)
    assert streams.log == ["on the copy stream", "normalized", "event recorded", "off it"]
    batch = copier.finish_copy(copy)
    assert streams.log[4:] == ["compute waits for the event"]
    assert len(recorded) == 2 and recorded[0] is batch.inputs and recorded[1] is batch.targets


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_batches_on_a_gpu(square, opened):
    data = opened(source=str(square), augment="crop-flip")
    with loader_of(data, 0) as loader:
        expected = fetched(loader, range(3))
    with loader_of(data, 2, ("cuda:0", "cuda:0")) as loader:
        got = fetched(loader, range(3))
    assert all(batch.is_cuda for batch in got)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b)


class Numbers(JobData):
    """Sample i is the number i, which is loaded as int64 and converted on the device."""

    classes = 1
    shape = (1,)
    dtype = torch.float32
    test_batch = 3
    in_memory = True
    train_size = 32
    test_size = 8
    train_labels = np.zeros(32, np.int64)
    damaged = False

    def load(self, request):
        if self.damaged:
            raise SampleError(31) from ValueError("it is the last number")
        return torch.from_numpy(request.indices)

    def transform(self, batch):
        return Batch(batch.float(), batch)

    def sample(self, split):
        return self.transform(self.load(Request(split, np.arange(1))))

    def content_digest(self):
        return b""


def test_the_loader_needs_nothing_but_the_contract():
    data = Numbers()
    data.name = "numbers"
    with loader_of(data, 0) as loader:
        batches = loader.step(0)
        assert [batch.inputs.dtype for batch in batches] == [torch.float32] * 4
        assert len(set(torch.cat([batch.targets for batch in batches]).tolist())) == 16
        assert [batch.targets.tolist() for batch in loader.share(1, 2)] == [[1, 3, 5], [7]]
        data.damaged = True
        with pytest.raises(
            DataError, match=naming('"numbers"', "sample 31", '"train"', "last number")
        ):
            loader.step(1)


def test_a_custom_subclass_has_to_state_that_its_samples_are_independent():
    """Without this, the batches of several nodes would not be one array."""

    class Custom(SyntheticSource):
        pass

    class Stated(SyntheticSource):
        independent = True

    assert (SyntheticSource.independent, Custom.independent, Stated.independent) == (
        True,
        False,
        True,
    )
