"""Packed data sets: packing, opening, and rejection of invalid files."""

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from mpigossip.data.sources import DIGITS
from mpigossip.store import StoreError
from mpigossip.store.dataset import describe, open_dataset, pack
from mpigossip.store.packing import SPLITS, checksum_of
from tests.cases import naming
from tests.store.examples import folder_of_images, set_dataset


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack(folder_of_images(tmp_path / "images"), tmp_path / "out.h5")


def test_pack_keeps_files_labels_and_classes(tmp_path):
    root = folder_of_images(tmp_path / "images")
    out = pack(root, tmp_path / "out.h5")
    with open_dataset(out) as data:
        assert data.kind == "images" and data.classes == ("ape", "bee", "cat")
        assert data.channels == 3 and data.scale == 255
        assert data.attributes["source"] == str(root.resolve())
        assert data.train.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6
        assert len(data.split("test")) == 9
        assert data.train.encoded(7) == (root / "train/bee/1.png").read_bytes()
        with Image.open(root / "train/cat/5.png") as image:
            assert data.train.sizes[17].tolist() == [image.height, image.width]
        pixels = [np.asarray(Image.open(path)).reshape(-1, 3) for path in root.glob("train/*/*")]
        pixels = np.concatenate(pixels) / 255
        np.testing.assert_allclose(data.mean, pixels.mean(0), atol=1e-6)
        np.testing.assert_allclose(data.std, pixels.std(0), atol=1e-6)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_pack_val_and_gray_and_smaller(tmp_path):
    root = folder_of_images(tmp_path / "images", test="val", mode="L")
    with open_dataset(pack(root, tmp_path / "out.h5", image_size=10)) as data:
        assert data.channels == 1 and data.mean.shape == (1,)
        assert data.train.sizes.min() == 10 and data.train.sizes.max() <= 15
        assert data.train.encoded(0)[:2] == b"\xff\xd8"  # JPEG


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pack_decoded_keeps_pixels(tmp_path, mode):
    root = folder_of_images(tmp_path / "images", mode=mode, sides=(9, 9))
    with (
        open_dataset(pack(root, tmp_path / "files.h5")) as files,
        open_dataset(pack(root, tmp_path / "pixels.h5", decoded=True)) as data,
    ):
        assert data.kind == "arrays" and data.channels == files.channels == (
            3 if mode == "RGB" else 1
        )
        for split in SPLITS:
            stored = sorted((root / split).glob("*/*"))
            expected = np.stack([np.asarray(Image.open(path)) for path in stored])
            expected = expected.transpose(0, 3, 1, 2) if mode == "RGB" else expected[:, None]
            np.testing.assert_array_equal(data.split(split).array(), expected)
            np.testing.assert_array_equal(data.split(split).labels, files.split(split).labels)
        np.testing.assert_array_equal([data.mean, data.std], [files.mean, files.std])


def test_large_files_are_decoded_in_threads(tmp_path):
    root = folder_of_images(tmp_path / "images", sides=(90, 100))
    with open_dataset(pack(root, tmp_path / "out.h5")) as data:
        names = sorted(root.glob("train/*/*"))
        assert all(data.train.encoded(i) == path.read_bytes() for i, path in enumerate(names))


def test_pack_text(tmp_path):
    root = tmp_path / "texts"
    (root / "deep").mkdir(parents=True)
    (root / "b.txt").write_bytes(b"0123456789" * 10)
    (root / "deep" / "c.txt").write_bytes(b"x" * 50)
    (root / "a.txt").write_bytes(b"")
    (root / ".hidden").write_bytes(b"secret")
    with open_dataset(pack(root, tmp_path / "out.h5", text=True)) as data:
        assert data.kind == "text" and data.classes == ("b.txt", "deep/c.txt")
        assert data.train.array().tobytes() == b"0123456789" * 9 + b"x" * 45
        assert data.test.encoded(0) == b"0123456789" and data.test.encoded(1) == b"xxxxx"


def moved(name):
    """Return a change of a folder of images: a file or folder of it is moved out."""
    return lambda images: (images / name).rename(images.parent / "elsewhere")


def halve_a_file_and_add_another(images):
    (images / "train/ape/notes.txt").write_text("not an image")
    content = (images / "test/bee/0.png").read_bytes()
    (images / "test/bee/0.png").write_bytes(content[: len(content) // 2])


def add_an_image_of_16_bits(images):
    """Pillow would clip the pixels, so that most of the image would become white."""
    pixels = np.full((9, 9), 40_000, np.uint16)
    Image.fromarray(pixels).save(images / "train/ape/0.png")


def add_an_empty_folder(images):
    (images / "empty").mkdir()


def add_a_text(images):
    (images / "b.md").write_text("a text")


def add_an_hdf5_file(images):
    with h5py.File(images / "mine.h5", "w") as file:
        file["measured"] = [1, 2, 3]


def add_an_hdf5_file_with_a_format(images):
    with h5py.File(images / "mine.h5", "w") as file:
        file.attrs["format"] = ["mine", "1.0"]


REJECTED_BY_PACK = {
    "images of several sizes": (None, "", "", {"decoded": True}, ("--decoded", "sizes")),
    "decoded text": (
        *(None, "", "", {"decoded": True, "text": True}),
        ("--decoded", "for images"),
    ),
    "size of a text": (
        *(None, "", "", {"image_size": 32, "text": True}),
        ("--image-size 32", "images"),
    ),
    "size 0": (None, "", "", {"image_size": 0}, "--image-size 0"),
    "no such folder": (None, "nothing", "", {}, ("nothing", "not a folder")),
    "no folder for the file": (
        None,
        "",
        "nowhere/out.h5",
        {},
        ("nowhere/out.h5", "can't be written"),
    ),
    "no text": (add_an_empty_folder, "empty", "", {"text": True}, "no files with text"),
    "a text in place of the data set": (
        *(add_a_text, "", "images/b.md", {"text": True}),
        ("b.md", "not a data set"),
    ),
    "another HDF5 file in place of the data set": (
        *(add_an_hdf5_file, "", "images/mine.h5", {}),
        ("mine.h5", "not a data set"),
    ),
    "a file of another format in place of the data set": (
        *(add_an_hdf5_file_with_a_format, "", "images/mine.h5", {}),
        ("mine.h5", "not a data set"),
    ),
    "no folder train": (moved("train"), "", "", {}, "no folder train/"),
    "no folder test": (moved("test"), "", "", {}, "no folder val/"),
    "a class without samples": (moved("train/cat"), "", "", {}, ("classes", "lacks: cat")),
    "damaged files": (
        *(halve_a_file_and_add_another, "", "", {}),
        ("2 of 28 files", "notes.txt", "test/bee/0.png"),
    ),
    "16 bits": (
        *(add_an_image_of_16_bits, "", "", {}),
        ("1 of 27 files", "I;16", "8 bits"),
    ),
}
"""Case: change of the folder of images, packed folder in it, packed file, options, and message.

"" stands for the folder of images itself, or for the file out.h5 next to it.
"""


@pytest.mark.parametrize("name", REJECTED_BY_PACK)
def test_what_pack_rejects(tmp_path, name):
    """Nothing is written: all files are as they were before the call."""
    change, source, out, options, message = REJECTED_BY_PACK[name]
    images = folder_of_images(tmp_path / "images")
    if change:
        change(images)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(StoreError, match=naming(message)):
        pack(images / source, tmp_path / (out or "out.h5"), **options)
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert after == before


def test_a_data_set_is_packed_again_even_if_it_is_damaged(tmp_path):
    images = folder_of_images(tmp_path / "images")
    out = pack(images, tmp_path / "out.h5")
    complete = out.read_bytes()
    pack(images, out)
    out.write_bytes(out.read_bytes()[:1000])
    pack(images, out)
    assert len(out.read_bytes()) == len(complete)
    with open_dataset(out) as data:
        assert len(data.train) > 0


def test_show(packed):
    text = describe(packed)
    assert "images, 3 classes" in text and "18 samples" in text and "ape, bee, cat" in text
    assert "CC BY 4.0" in describe(DIGITS) and "1437 samples" in describe(DIGITS)


def set_element(name, index, value):
    def change(file):
        file[name][index] = value

    return change


def without_file(path):
    path.unlink()


def folder(path):
    path.unlink()
    path.mkdir()


def text_file(path):
    path.write_text("hello")


def other_hdf5_file(path):
    with h5py.File(path, "w") as file:
        file["x"] = 1


def shorter(path):
    path.write_bytes(path.read_bytes()[:-2000])


def chunked(path):
    with h5py.File(path, "r+") as file:
        payload = file["train/bytes"][:]
        del file["train/bytes"]
        file.create_dataset("train/bytes", data=payload, chunks=(100,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_file, ("not exist", "data pack")),
        (folder, "is a folder"),
        (text_file, "HDF5 file"),
        (other_hdf5_file, "attribute format"),
        (shorter, "truncated"),
        (chunked, "not stored contiguously"),
    ],
)
def test_files_that_are_no_complete_data_set_are_rejected(packed, change, message):
    change(packed)
    with pytest.raises(StoreError, match=naming(message)):
        open_dataset(packed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_element("train/labels", 4, 3),
            ("1 labels of train", "0 … 2", "3"),
        ),
        (set_element("test/labels", 0, -1), ("1 labels of test", "-1")),
        (set_element("train/offsets", 3, 10**9), ("offsets of train", "ascend")),
        (set_element("train/offsets", 18, 5), ("offsets of train", "ascend")),
        (set_element("train/sizes", 0, 0), ("height and width", "1 to 65536")),
        (set_dataset("train/offsets", np.zeros(4, np.int64)), "4 offsets for 18 labels"),
        (set_dataset("train/bytes", np.zeros(9, np.float32)), ("train/bytes", "float32", "uint8")),
        (set_dataset("train/labels", np.zeros(0, np.int64)), "offsets for 0 labels"),
        (lambda file: file.__delitem__("test"), "incomplete or damaged"),
        (lambda file: file.__delitem__("classes"), "incomplete or damaged"),
        (lambda file: file.attrs.__delitem__("mean"), "incomplete or damaged"),
        (lambda file: file.attrs.update(std=np.zeros(3)), ("std", "scale", "0")),
        (lambda file: file.attrs.update(version=7), ("version is 7", "2 to 3")),
        (lambda file: file.attrs.update(version="old"), "incomplete or damaged"),
        (lambda file: file.attrs.update(kind=np.bytes_("video")), "kind is 'video'"),
    ],
)
def test_contents_that_contradict_each_other_are_rejected(packed, change, message):
    """The checksums are right, and the message is one line that names the file."""
    with h5py.File(packed, "r+") as file:
        change(file)
        for split in set(SPLITS) & set(file):  # contradictions, not damage
            file[split].attrs["checksum"] = checksum_of(file[split])
    with pytest.raises(StoreError, match=naming(message)) as error:
        open_dataset(packed)
    assert str(packed) in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_becomes_shorter_while_open(packed):
    with open_dataset(packed) as data:
        with packed.open("rb+") as file:
            file.truncate(data.train.start + 10)
        with pytest.raises(StoreError, match=naming("shorter")):
            data.train.encoded(17)
    data.close()
    with pytest.raises(ValueError, match=naming("closed file")):
        data.train.encoded(0)


def test_digits_are_complete():
    with open_dataset(DIGITS) as data:
        assert (len(data.train), len(data.test)) == (1437, 360)
        assert data.train.array().shape == (1437, 1, 8, 8) and data.train.array().max() == 16
        assert re.search("Alpaydin", data.attributes["source"])
        pixels = data.train.array() / data.scale
        np.testing.assert_allclose([data.mean[0], data.std[0]], [pixels.mean(), pixels.std()])
