"""Torch datasets as the data of a job: results of functions, loading, resuming, and errors."""

import atexit
import itertools
import multiprocessing
import os
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from mpigossip.config import Data, JobError
from mpigossip.data import pytree
from mpigossip.data.datasets import Datasets, content_hash, same_content
from mpigossip.data.loader import DataError, Loader
from mpigossip.data.partition import Share, make_orders
from mpigossip.data.sources import check_alike, source
from mpigossip.store.packing import pack
from tests.cases import every, naming, on_each, with_world


class Squares(Dataset):
    """Dataset whose sample i is i, i² and three random numbers."""

    def __init__(self, count=64):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == 13 and self.count == 63:
            raise ValueError("no thirteen")
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return {"x": torch.tensor([float(index)]), "y": index**2, "drawn": torch.tensor(drawn)}


class Aborting(Squares):
    """Dataset whose loading process aborts at its end, as running C++ threads may cause."""

    def __getitem__(self, index):
        if multiprocessing.parent_process():  # not in this process, which reads a sample, too
            atexit.register(os.abort)
        return super().__getitem__(index)


class Launched(Dataset):
    """Dataset that returns whether the loading process sees a launcher, MPI and CUDA."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        known = [name for name in os.environ if name.startswith(("PMI", "OMPI_", "SLURM_"))]
        loaded = "mpi4py.MPI" in sys.modules
        return torch.tensor([len(known), loaded, os.environ.get("CUDA_VISIBLE_DEVICES") == ""])


class Counts(IterableDataset):
    """Stream of 0, 1, 2, …, each with a random number, up to ``end`` or endless."""

    def __init__(self, end=None, start=0):
        self.start = start
        self.end = end

    def __iter__(self):
        numbers = itertools.count(self.start) if self.end is None else range(self.start, self.end)
        for number in numbers:
            yield torch.tensor([float(number), torch.rand(()).item()])


class Known(Counts):
    """Stream of numbers that has a length."""

    def __len__(self):
        return self.end


def squares(samples=64):
    return {"train": Squares(samples), "test": Squares(10)}


def counts(end=None):
    return {"train": Counts(end), "test": Counts()}


def noisy(samples):
    """Collate samples with additional random numbers, as for masked tokens."""
    return torch.cat([torch.stack(samples), torch.rand(len(samples), 1)], 1)


def masked():
    return counts() | {"collate": noisy}


def own_counts(node, nodes):
    return {"train": Counts(start=1000 * node), "test": Counts(6 * node + 6, 6 * node)}


@pytest.fixture
def user_module(monkeypatch):
    """Return a function: `user_module(name=function)` makes a module that a job can name."""

    def put(**functions):
        module = ModuleType("mine")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, "mine", module)

    return put


def opened(name, n=2, rows=None, workers=0, slots=1, **settings):
    """Return the loader of all nodes, or of some nodes."""
    section = Data(source=f"mine:{name}", batch=settings.pop("batch", 4), **settings)
    rows = range(n) if rows is None else rows
    data = source(section, 3, rows, n)
    each = make_orders(data, section, 3, n, slots * section.batch)
    devices = ("cpu",) * slots
    return Loader(
        data, [each[row] for row in rows], seed=3, devices=devices, workers=workers, timeout_s=60
    )


def test_nested_batches_keep_their_structure():
    Pair = __import__("collections").namedtuple("Pair", "a b")
    batch = {"a": [torch.arange(4), (torch.ones(4, 2), "text")], "b": Pair(torch.zeros(()), 7)}
    twice = pytree.map_tensors(lambda one: one * 2, batch)
    assert twice["a"][0].tolist() == [0, 2, 4, 6] and twice["a"][1][1] == "text"
    assert isinstance(twice["b"], Pair) and twice["b"].b == 7 and isinstance(twice["a"][1], tuple)
    assert pytree.size(batch) == 4 and pytree.size("text") == 1
    first, second = pytree.parts(batch, 2)
    assert first["a"][0].tolist() == [0, 1] and second["a"][1][0].shape == (2, 2)
    assert pytree.parts(batch, 1)[0] is batch
    assert pytree.form((torch.ones(2, 1), {"y": 3})) == '(float32 (2, 1), {"y": int})'
    together = pytree.stacked([batch, twice])
    assert together["a"][0].shape == (2, 4) and together["b"].a.shape == (2,)
    with pytest.raises(pytree.CutError, match=naming("algorithm.accumulate = 3", "int64 (4,)")):
        pytree.parts(batch, 3)


def test_a_function_gets_the_arguments_of_its_parameters(user_module):
    seen = []

    def asks(seed, nodes, samples, *, width: int = 3):
        seen.append((seed, nodes, samples, width, torch.rand(()).item()))
        return squares()

    user_module(asks=asks, old=lambda data, seed: seen.append((data.batch, seed)) or squares())
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    source(Data(source="mine:asks", samples=7, options={"width": 5}), 11, (1,), 4)
    source(Data(source="mine:asks", samples=7), 11, (1, 2), 4)
    source(Data(source="mine:old", batch=9), 12)
    assert [one[:4] for one in seen[:2]] == [(11, 4, 7, 5), (11, 4, 7, 3)] and seen[2] == (9, 12)
    assert seen[0][4] == seen[1][4], "its random numbers follow from the seed of the job"
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def figures(batches):
    return [torch.cat([b["x"].flatten(), b["drawn"].flatten()]).tolist() for b in batches]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("workers", [0, every(2)])
def test_a_batch_follows_from_its_step_alone(user_module, workers):
    """Samples and their random numbers agree from any step on, for all nodes or for one."""
    user_module(squares=squares)
    with opened("squares", slots=2, batch=2) as loader:
        whole = [figures(loader.step(step)) for step in range(6)]
        outside = torch.get_rng_state()
        tests = [figures(loader.share(node, 2)) for node in range(2)]
        assert torch.equal(outside, torch.get_rng_state())
    assert len(whole[0]) == 4
    numbers = [batch[:2] for step in whole for batch in step]
    assert len({x for pair in numbers for x in pair}) == 48  # 48 of 64 samples, each once
    with opened("squares", rows=[1], slots=2, batch=2, workers=workers) as late:
        assert [figures(late.step(step)) for step in (3, 4, 5)] == [one[2:] for one in whole[3:]]
        assert figures(late.step(1)) == whole[1][2:]
        for _ in range(2):
            assert figures(late.share(1, 2)) == tests[1]
        assert figures(late.step(2)) == whole[2][2:]
    assert sorted(x for share in tests for b in share for x in b[: len(b) // 4]) == list(range(10))


def test_loading_processes_do_not_see_the_launcher(user_module, monkeypatch):
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "0")
    user_module(launched=lambda: {"train": Launched(), "test": Launched()})
    import mpi4py.MPI  # noqa: F401  as in a rank

    with opened("launched", workers=1) as loader:
        loader.timeout_s = 1e9  # more than poll() takes
        known, mpi, hidden = loader.step(0)[0].unbind(1)
    assert not known.any() and not mpi.any() and hidden.all()
    assert os.environ["PMI_RANK"] == "0", "this process keeps its variables"


@pytest.mark.every
def test_the_exit_code_of_a_finished_loading_process_is_ignored(user_module):
    user_module(aborting=returning(Aborting()))
    with opened("aborting", workers=2) as loader:
        first = figures(loader.step(0))
        loader.step(3)
        assert figures(loader.step(0)) == first
        processes = loader._batches._workers
    for process in processes:
        process.join(60)
        assert process.exitcode is not None


@pytest.mark.usefixtures("forked")
@on_each("workers", [0, 1])
def test_rows_of_a_stream_are_assigned_to_nodes_in_turn(user_module, workers):
    """The stream is repeated; starting at a later step reads all earlier rows again."""
    user_module(counts=counts)
    with opened("counts", workers=workers, options={"end": 12}, test_samples=5) as loader:
        steps = [torch.cat(loader.step(step)) for step in range(4)]
        tests = [torch.cat(list(loader.share(node, 2)))[:, 0].tolist() for node in range(2)]
        assert loader.note(3) == [
            "the stream is read again from its beginning, 12 samples per node"
        ]
    assert steps[0][:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert steps[1][:, 0].tolist() == [8, 10, 0, 2, 9, 11, 1, 3]
    assert tests == [[0, 2, 4], [1, 3]]
    with opened("counts", rows=[1], options={"end": 12}) as late:
        assert torch.equal(late.step(3)[0], steps[3][4:])


def test_a_collate_of_a_stream_draws_the_same_after_a_resume(user_module):
    user_module(masked=masked)
    with opened("masked", slots=2, batch=2) as loader:
        steps = [loader.step(step) for step in range(3)]
    assert len({x for step in steps for batch in step for x in batch[:, 2].tolist()}) == 24
    with opened("masked", rows=[1], slots=2, batch=2) as late:
        for resumed, batch in zip(late.step(2), steps[2][2:], strict=True):
            assert torch.equal(resumed, batch)


def test_each_node_may_have_its_own_stream(user_module):
    user_module(own_counts=own_counts)
    with opened("own_counts", n=3, rows=[0, 2], samples=48) as loader:
        first = [batch[:, 0].tolist() for batch in loader.step(0)]
        assert first == [[0, 1, 2, 3], [2000, 2001, 2002, 2003]]
        assert loader.orders[1] == Share(2, 3, 4, 4)
        assert next(loader.share(2, 3))[:, 0].tolist() == [12, 13, 14, 15]


def own_test_set(node, nodes):
    return {
        "train": Counts(start=1000 * node),
        "test": TensorDataset(torch.arange(6.0) + 10 * node),
    }


def uneven_test_sets(node):
    return {"train": Counts(), "test": Squares(4 + node)}


@pytest.mark.parametrize("workers", [0, every(1)])
def test_each_node_may_have_its_own_test_set(user_module, workers):
    user_module(own_test_set=own_test_set)
    for rows in ([0, 1], [1]):  # Test simulated nodes, and one node on a rank.
        with opened("own_test_set", rows=rows, workers=workers, samples=48) as loader:
            (batch,) = loader.share(1, 2)
            assert batch[0].tolist() == [11, 13, 15]


def test_a_test_stream_with_a_length_is_tested_completely(user_module):
    user_module(known=returning(Counts(), Known(9)))
    with opened("known", test_samples=5) as loader:
        tests = [torch.cat(list(loader.share(node, 2)))[:, 0].tolist() for node in range(2)]
    assert tests == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]


def test_samples_in_memory_need_no_process(user_module):
    one = TensorDataset(torch.ones(32, 2), torch.zeros(32))
    user_module(memory=lambda: {"train": one, "test": one})
    with opened("memory", workers=2) as loader:
        assert loader.workers == 0 and loader.step(0)[0][0].shape == (4, 2)


class Endless(Counts):
    def __iter__(self):
        return self

    def __next__(self):
        return torch.zeros(2)


class Ragged(Squares):
    def __getitem__(self, index):
        return torch.zeros(1 + index % 2)


def returning(train, test=None, **more):
    return lambda: {"train": train, "test": Squares(4) if test is None else test} | more


@on_each(
    "function, settings, message",
    [
        (returning(Squares(0)), {}, ('"train"', "no sample")),
        (returning(Squares(4), TensorDataset(torch.ones(0))), {}, ('"test"', "no sample")),
        (returning(Counts(0)), {}, ('"train"', "no sample")),
        (returning([1, 2]), {}, ('"train"', "list")),
        (lambda: {"train": Squares()}, {}, "{'train'}"),
        (returning(Squares(), collate=3), {}, ('"collate"', "int")),
        (returning(Squares()), {"augment": "crop-flip"}, ('data.augment = "crop-flip"', '"none"')),
        (returning(Squares()), {"partition": "sorted"}, ('data.partition = "sorted"', "`targets`")),
        (
            returning(Counts()),
            {"partition": "dirichlet"},
            ('data.partition = "dirichlet"', "stream"),
        ),
        (returning(Squares()), {"options": {"wide": 3}}, "'wide'"),
        (lambda node: squares(), {}, ("`node`", "Dataset", "length")),
        (uneven_test_sets, {}, ('"test"', "[4, 5]")),
        (returning(Squares(6)), {}, ("3 training samples", "4", "data.batch")),
        (returning(Counts()), {"samples": 7}, ("7 samples", "data.samples", "2 nodes x 4")),
        (
            returning(Ragged(), collate=lambda rows: 1 / 0),
            {},
            ("ZeroDivisionError", "test_datasets.py:"),
        ),
    ],
)
def test_invalid_data_are_reported_before_training_starts(user_module, function, settings, message):
    user_module(wrong=function)
    with pytest.raises(JobError, match=naming(message)):
        opened("wrong", **settings)


@pytest.mark.usefixtures("forked")
@on_each(
    "workers, function, message",
    [
        (
            1,
            returning(Squares(63)),
            ("sample 13", '"train"', "ValueError", "test_datasets.py:", "no thirteen"),
        ),
        (
            0,
            returning(Squares(63)),
            ("sample 13", '"train"', "ValueError", "test_datasets.py:", "no thirteen"),
        ),
        (
            0,
            returning(Ragged()),
            ('"train"', "batch", "RuntimeError", "equal size"),
        ),
        (1, returning(Endless()), ('"train"', "ValueError", "__iter__")),
        (0, returning(Counts(1)), ("ValueError", "1 samples", "2")),
    ],
)
def test_data_that_fail_during_training_are_reported(user_module, workers, function, message):
    user_module(wrong=function)
    with (
        opened("wrong", workers=workers) as loader,
        pytest.raises(DataError, match=naming(message)) as caught,
    ):
        for step in range(16):
            loader.step(step)
    assert "\n" not in str(caught.value)


def test_data_that_cannot_be_pickled_are_reported(user_module):
    class Inside(Squares):
        """Class that cannot be pickled."""

    user_module(inside=returning(Inside()))
    with opened("inside", workers=1) as loader, pytest.raises(JobError) as caught:
        loader.step(0)
    assert 'data.source = "mine:inside"' in str(caught.value)
    assert "data.workers = 0" in str(caught.value) and "/multiprocessing/" not in str(caught.value)


def test_labels_of_a_data_set_are_its_targets(user_module):
    labelled = Squares(40)
    labelled.targets = [i % 2 for i in range(40)]
    user_module(labelled=returning(labelled))
    with opened("labelled", partition="sorted") as loader:
        (even, odd) = (batch["x"] % 2 for batch in loader.step(0))
    assert not even.any() and odd.all()


@pytest.mark.parametrize("targets", [[[i % 2, i % 3] for i in range(40)], [[0]] * 39 + [[0, 1]]])
def test_several_targets_per_sample_are_no_labels(user_module, targets):
    """Sorting rows of targets would give indices of other samples."""
    labelled = Squares(40)
    labelled.targets = targets
    user_module(labelled=returning(labelled))
    with pytest.raises(JobError, match=naming('data.partition = "sorted"', "`targets`")):
        opened("labelled", partition="sorted")
    with opened("labelled", partition="shuffled") as loader:
        assert len(loader.step(0)) == 2


@with_world
def sizes(world):
    """Return the message of each rank about data of different sizes."""
    from types import SimpleNamespace

    def of_size(train_size):
        return SimpleNamespace(train_size=train_size, test_size=2, content_digest=lambda: b"")

    check_alike("mine:same", of_size(8), world)
    differing = of_size(8 + world.rank // 2)
    with pytest.raises(JobError) as caught:
        check_alike("mine:other", differing, world)
    return str(caught.value)


def test_sizes_that_differ_between_ranks_are_reported_on_all(ranks):
    for text in ranks(3)(sizes):
        assert '"mine:other": rank 0 on' in text and "8 training and 2 test samples" in text
        assert "rank 2 on" in text and "has 9 and 2" in text


class Watched(IterableDataset):
    """Stream of 20 random rows that counts the rows that were read."""

    read = 0

    def __iter__(self):
        for number in range(20):
            self.read += 1
            yield torch.tensor(number) + torch.rand(())


def test_a_test_stream_is_read_one_batch_at_a_time(user_module):
    stream = Watched()
    user_module(watched=lambda seed: {"train": Rows(0), "test": stream})
    with opened("watched", n=1, test_samples=20) as loader:
        stream.read = 0
        batches = loader.share(0, 1)
        first = next(batches)
        assert stream.read == len(first) == 4
        torch.rand(3)  # random numbers of the program do not affect the stream
        rest = list(batches)
        assert stream.read == 20
        again = list(loader.share(0, 1))
        assert torch.equal(torch.cat([first, *rest]), torch.cat(again))


class Rows(IterableDataset):
    """Stream of 20 numbers that starts at ``first``."""

    def __init__(self, first):
        self.first = first

    def __iter__(self):
        return iter(torch.arange(self.first, self.first + 20))


def kinds(change, at, folder):
    """Return each kind of data, with one changed sample if ``change``."""
    x = torch.arange(40.0).reshape(20, 2)
    x[at] += change
    pairs = [(Image.new("L", (4, 4), int(row[0])), f"text {row[1]:g}") for row in x]
    sets = {
        "tensors": TensorDataset(x, torch.arange(20)),
        "objects": [*pairs],
        "stream": Rows(int(change)),
    }
    for name, train in sets.items():
        if isinstance(train, list):
            train = Listed(train)
        mapping = {"train": train, "test": TensorDataset(x[:2])}
        if name == "objects":
            mapping["collate"] = lambda items: torch.zeros(len(items))
        yield name, Datasets([mapping], Data(source=name), 0, dealt=True)
    text = Data(source="synthetic", shape=(3,), samples=20)
    yield "synthetic", source(text, 1 + int(change))
    pixels = np.full((4, 4), 7, np.uint8)
    for split, number in itertools.product(("train", "test"), range(3)):
        directory = folder / f"{int(change)}" / split / "class"
        directory.mkdir(parents=True, exist_ok=True)
        pixels[0, 0] = number + (change if number == 2 else 0)
        Image.fromarray(pixels).save(directory / f"{number}.png")
    packed = folder / f"{int(change)}.h5"
    pack(folder / f"{int(change)}", packed)
    yield "packed", source(Data(source=str(packed)), 0)


class Listed(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Undetermined(Dataset):
    """Dataset whose samples differ at each read, as with a transform that has its own generator."""

    def __init__(self):
        self.random = np.random.default_rng()

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.random.random(3)


@with_world
def contents(world, folder):
    """Return for each kind of data the message about samples that differ on the last rank."""
    rank_folder = Path(folder) / str(world.rank)
    rank_folder.mkdir()
    messages = {}
    alike = dict(kinds(0, 0, rank_folder))
    changed = dict(kinds(1, 0, rank_folder))
    for name, same in alike.items():
        check_alike(name, same, world)
        if name == "stream":  # Values of a stream are not compared, because they may be random.
            check_alike(name, changed[name] if world.rank == 2 else same, world)
            continue
        with pytest.raises(JobError) as caught:
            check_alike(name, changed[name] if world.rank == 2 else same, world)
        messages[name] = str(caught.value)
    undetermined = {"train": Undetermined(), "test": Undetermined()}
    check_alike("mine:random", Datasets([undetermined], Data(), 0, dealt=True), world)
    with pytest.raises(JobError) as caught:
        check_alike("digits", alike["tensors"], world, "ab" if world.rank == 1 else "cd")
    return messages, str(caught.value)


def test_paths_and_rounding_do_not_make_another_data_set():
    draw = np.random.default_rng(0).standard_normal((3, 64, 64)).astype(np.float32)
    other = np.random.default_rng(1).standard_normal((3, 64, 64)).astype(np.float32)
    hashed = content_hash(["/scratch/a", torch.from_numpy(draw), 0.1, 3])
    near = np.nextafter(draw, np.float32(np.inf))
    assert same_content(hashed, content_hash(["/scratch/b", torch.from_numpy(near), 0.1 + 1e-9, 3]))
    assert not same_content(hashed, content_hash(["/scratch/a", torch.from_numpy(draw), 0.1, 4]))
    assert not same_content(hashed, content_hash(["/scratch/a", torch.from_numpy(other), 0.1, 3]))
    assert not same_content(hashed, content_hash(["/scratch/a", torch.from_numpy(draw), 0.2, 3]))
    wide = torch.from_numpy(draw).double()
    assert not same_content(content_hash(wide), content_hash(wide.float()))


def test_samples_that_differ_between_ranks_are_reported_on_all(ranks, tmp_path):
    for messages, partition in ranks(3)(contents, str(tmp_path)):
        assert set(messages) == {"tensors", "objects", "synthetic", "packed"}
        for name, text in messages.items():
            assert f'"{name}": samples on rank 2 on' in text
        assert "on rank 1" in partition
