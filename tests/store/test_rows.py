"""Models whose ranks hold rows of each parameter: any number of ranks reads them."""

import json

import numpy as np
import pytest

from mpigossip.members.live import digest
from mpigossip.members.parts import joined
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.node_state import SHARDED_DIMS, NodeState
from mpigossip.store.rows import Rows, is_divided

NAMES = ("a.weight", "a.bias", "b")
SHAPES = ((7, 3), (5,), (2, 6, 3))


def model():
    rng = np.random.default_rng(0)
    arrays = {
        f"torch/{name}/exp_avg": rng.standard_normal(shape, "f4")
        for name, shape in zip(NAMES, SHAPES, strict=True)
    }
    arrays |= {f"torch/{name}/step": np.array(3.0) for name in NAMES}
    arrays |= {"buffers/0/mean": np.arange(4.0)}
    flat = rng.standard_normal(21 + 5 + 36, "f4")
    return NodeState(flat, NAMES, SHAPES, arrays, {"index": 1, "torch": "{}"})


def parts(count, dims):
    all_rows = [Rows(rank, count, NAMES, SHAPES, dims) for rank in range(count)]
    return [rows.collect([(0, model())], 1) for rows in all_rows], all_rows


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, 2)])
@pytest.mark.parametrize("writers", [1, 2, 3, 4])
@pytest.mark.parametrize("readers", [1, 2, 4, 8])
def test_rows_are_read_by_another_number_of_ranks(writers, readers, dims):
    written, _ = parts(writers, dims)
    expected, all_rows = parts(readers, dims)
    for rows, state in zip(all_rows, expected, strict=True):
        needed = [n for n in range(writers) if rows.needs(n, writers)]
        read = rows.collect(((n, written[n]) for n in needed), writers)
        assert digest(read) == digest(state) and is_divided(state) == (readers > 1)
        assert rows.first == sum(other.count for other in all_rows[: rows.rank])
    if writers > 1:
        assert digest(joined(written)) == digest(model())


def test_a_checkpoint_of_rows_has_the_digest_of_the_whole_model(tmp_path):
    digests = set()
    for count in (1, 2, 4):
        run = tmp_path / str(count)
        temporary = checkpoint.begin(run, 1)
        states, _ = parts(count, (0, 0, 2))
        entries = [
            checkpoint.write_node(temporary, node, state) for node in range(2) for state in states
        ]
        path = checkpoint.commit(temporary, run, 1, entries, "", {})
        assert checkpoint.verify(path) == []
        assert digest(checkpoint.read_node(path, 1)) == digest(model())
        digests.add(checkpoint.digest(path))
        for entry, state in zip(entries, states, strict=False):
            read, sha = checkpoint.read_parameters(path, entry, 62, 1)
            assert sha == digest(state) and not read.arrays and not read.pieces
            assert (read.parameters == state.parameters).all()
    assert len(digests) == 1


def test_files_of_another_model_are_rejected():
    rows = Rows(0, 2, NAMES, ((7, 3), (5,), (2, 3, 6)), (0, 0, 0))
    with pytest.raises(StoreError, match="other names or shapes than this program"):
        rows.collect([(0, model())], 1)
    assert json.loads(rows.numbers[SHARDED_DIMS]) == [0, 0, 0]
