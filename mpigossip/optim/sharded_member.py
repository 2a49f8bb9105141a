"""Member of several ranks whose model FSDP2 shards: each rank has its own elements only.

Publishing, averaging, starting and replaying a model go through files and windows of elements (see
:mod:`mpigossip.engine.shard_streams`). Besides its shards of the parameters, gradients and the
optimizer's state, a rank needs memory for a few windows.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from mpigossip.cluster.deadline import WaitTimeoutError, paused
from mpigossip.cluster.world import World
from mpigossip.engine.shard_streams import Run, ShardStreams, flat_shard, stored_dtype
from mpigossip.engine.sharded import empty_shard, fully_sharded, is_sharded, reshard
from mpigossip.members.outages import FolderUnreachable
from mpigossip.members.parts import Part
from mpigossip.members.place import TooFarBehind
from mpigossip.members.records import Round
from mpigossip.members.streamed import PeerModel, StreamedExchange
from mpigossip.mixing.combine import weighted_sum
from mpigossip.optim.member import LoopMember
from mpigossip.optim.state import is_sharded_like, read_optimizer, write_optimizer
from mpigossip.runs.members.member import average
from mpigossip.runs.members.replay import ReplayLog, wanted_of
from mpigossip.runs.snapshot_and_restore import put_buffers
from mpigossip.store import StoreError, manifest, piecewise
from mpigossip.store.checkpoint import NodeState, Number
from mpigossip.store.manifest import Entry
from mpigossip.store.node_state import STATE_PIECES
from mpigossip.store.piecewise import PIECE, PartSource, StoredModel, Stream

T = TypeVar("T")

FLOAT32 = np.dtype("<f4")
SMALLEST_PIECE = 1 << 14
"""Smallest number of elements that are read at a time, if many models are averaged."""


def is_divided(world: World, model: torch.nn.Module) -> bool:
    """Return whether a model is sharded among several ranks, each of which writes its own part."""
    return world.size > 1 and any(is_sharded(p) for p in model.parameters() if p.requires_grad)


def streams_of(world: World, model: torch.nn.Module) -> ShardStreams | None:
    """Return the streams of a model that is sharded among several ranks, otherwise None."""
    if not is_divided(world, model):
        return None
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
    dims = [p.placements[0].dim for p in trained]
    return ShardStreams(world, [tuple(p.shape) for p in trained], dims, world.rank)


def part_of(streams: ShardStreams, world: World) -> Part:
    """Return the part of the model that the file of this rank holds."""
    begin, end = streams.own
    return Part(world.rank, world.size, world.size, begin, end - begin)


class SpilledModel:
    """Model in temporary files of all ranks, which are removed when nothing refers to it."""

    def __init__(
        self, folder: Path, files: Sequence[Entry], digests: Sequence[str], rank: int, step: int
    ):
        """Refer to files that all ranks have written.

        :param folder: folder of the files, which all ranks can read
        :param files: entry of each rank's file
        :param digests: digest of each file
        :param rank: rank of this process, which removes its file
        :param step: step count that is stored with the model
        """
        self._step = step
        self.digests = digests
        self._folder = folder
        self._entries = files
        self._rank = rank
        firsts = accumulate((entry.parameters for entry in files), initial=0)
        self._files = list(zip(files, firsts, strict=False))
        weakref.finalize(self, (folder / files[rank].file).unlink, missing_ok=True)

    def open(self, whole: bool = False) -> StoredModel:
        """Open the file of this rank, or the files of all ranks."""
        files = self._files if whole else self._files[self._rank : self._rank + 1]
        length = sum(entry.parameters for entry in self._entries)
        return StoredModel(self._folder, files, length, self._step)

    def parameter_pieces(self) -> Iterator[np.ndarray]:
        """Iterate over the pieces of the flat parameters of the whole model."""
        model = self.open(whole=True)
        length = sum(entry.parameters for entry in self._entries)
        try:
            for begin in range(0, length, PIECE):
                yield model.parameters(begin, min(begin + PIECE, length))
        finally:
            model.close()


class ShardedLoopMember(LoopMember):
    """Member of a custom loop whose ranks hold shards of the model."""

    _live: StreamedExchange

    def __init__(self, *arguments: Any, streams: ShardStreams):
        """Prepare to train; collective.

        :param arguments: arguments of `LoopMember`
        :param streams: streams of the model
        """
        self._streams = streams
        self._scratch: Any = None
        self._scratch_folder: Path | None = None
        self._spills = 0
        self._changed = False
        """True if the model may differ from the model with which the program began."""
        super().__init__(*arguments)

    def close(self) -> None:
        super().close()
        self._seed = None
        if self._scratch is not None:
            with suppress(OSError):
                self._scratch.cleanup()

    # -- start and end of a stay ------------------------------------------------------------------

    def _keep_seed(self) -> None:
        """Don't copy the model: it is written to a file if this member starts with it."""
        self._seed: SpilledModel | None = None

    def _begin(self, states: Sequence[Any]) -> None:
        """Start from the average of models in open files; none: from the program's first model."""
        models = [*states]
        if not models:
            if self._seed is None and self._changed:
                raise StoreError(
                    f"{self._folder}: the models of earlier rounds have vanished; copy them back "
                    "to models/, or start in a new folder"
                )
            if self._seed is None:
                self._seed = self._spill(self._source())
                self._changed = True
                return
            models = self._open([self._seed])
        self._changed = True
        try:
            self._load(models)
        finally:
            for model in models:
                model.close()

    def _spill(self, source: PartSource) -> SpilledModel:
        """Write a model to temporary files; collective."""
        rank = self._world.rank
        if self._scratch_folder is None:

            def make() -> str:
                if rank:
                    return ""
                self._scratch = tempfile.TemporaryDirectory(prefix="mpigossip-member-")
                return self._scratch.name

            self._scratch_folder = Path(self._on_all(make)[0])
        path = self._scratch_folder / manifest.name(self._spills, rank)
        folder = self._scratch_folder
        number = self._spills
        self._spills += 1

        def write() -> tuple[Entry, str]:
            written = piecewise.write(path, number, rank, source)
            return written.entry(), written.digest

        entries, digests = zip(*self._on_all(write), strict=True)
        step = int(source.numbers["index"])
        return SpilledModel(folder, entries, digests, rank, step)

    def _on_all(self, operation: Callable[[], T]) -> list[T]:
        """Return the results of an operation on all ranks, in rank order; collective.

        :param operation: function that each rank calls; its result can be pickled
        :raises Exception: on all ranks, if the operation of any rank raises an error about files.
            A rank that waits for the file system has to announce this by `paused`
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = operation()
        except WaitTimeoutError:
            raise
        except (OSError, StoreError, ValueError, FolderUnreachable, TooFarBehind) as raised:
            error = raised
        answers = self._world.broadcast(self._world.gather((result, error)))
        for _, problem in answers:
            if problem is not None:
                raise problem
        return [value for value, _ in answers]

    def _open(self, models: Sequence[SpilledModel]) -> list[StoredModel]:
        """Open this rank's files of models; collective."""
        opened: list[StoredModel] = []

        def open_all() -> None:
            for model in models:
                opened.append(model.open())

        try:
            self._on_all(open_all)
        except BaseException:
            for model in opened:
                model.close()
            raise
        return opened

    # -- rounds -----------------------------------------------------------------------------------

    def _exchange(self) -> None:
        self._live.send(self._source())
        # `send` has waited until the model of the previous round was published. A later stay starts
        # with a published model, so that the first one is not needed any more.
        if self._done > 1:
            self._seed = None
        peer = self._live.receive()
        if peer is not None:
            try:
                self._average(peer)
            finally:
                peer.close()

    def _repeat(self) -> Generator[int]:
        world = self._world
        self._live.limit_outages()
        log = ReplayLog(self._live.place, ranks=world.size)
        seed = self._spill(self._source())
        for version in log.repeating(wanted_of(log, None, None)):
            models, late, progress = log.take_models(version)
            self._begin(self._open((models or [seed])[: 1 if late is not None else None]))
            if late is not None:
                with self._opened(models[1:]) as (peer, then):
                    self._average(PeerModel(peer, then if late else None, late))
            self.progress = min(progress, self._live.place.plan.chunks - 1)
            yield log.round(version).chunk
            repeated = self._spill(self._source())
            log.check(version, repeated, self._equal(log.round(version), repeated))
        self.finished = bool(log.end)
        if self.finished:
            self._begin(self._open([log.models[key] for key in log.end]))

        def summarize() -> None:
            if world.rank == 0:
                with paused():
                    self._live.place.report(log.summary())

        self._on_all(summarize)
        log.models.clear()

    @contextmanager
    def _opened(self, models: Sequence[SpilledModel]) -> Iterator[list[StoredModel]]:
        """Return a context manager that opens this rank's files of models."""
        opened = self._open(models)
        try:
            yield opened
        finally:
            for model in opened:
                model.close()

    def _equal(self, record: Round, model: SpilledModel) -> bool:
        """Return whether a repeated model has the digests that its record contains; collective."""
        if len(record.files) > 1:
            return [shard.digest for shard in record.files] == [*model.digests]

        # Earlier versions wrote the model of several ranks to one file.
        def compare() -> bool:
            if self._world.rank:
                return False
            with paused(), closing(model.open(whole=True)) as whole:
                return whole.digest_as_whole() == record.digest

        return self._on_all(compare)[0]

    # -- the model and its files ------------------------------------------------------------------

    @property
    def _parameters(self) -> list[Any]:
        return [*self._trained.values()]

    def _source(self) -> PartSource:
        """Return this rank's part of the present model, to be written; collective.

        All ranks take over the buffers of rank 0.
        """
        reshard(fully_sharded(self._model))
        arrays = self._world.broadcast(self._buffer_arrays())
        if self._world.rank:
            put_buffers({0: self._buffers()}, _small_state(arrays, {}))
        states: dict[str, dict[str, Any]] = {}
        text = write_optimizer(self._optimizer, self._model, arrays, states)
        parameters = self._parameters

        def stream(tensors: Sequence[Any], dtype: np.dtype) -> Stream:
            def shard(index: int) -> torch.Tensor | None:
                tensor = tensors[index]
                return None if tensor is None else flat_shard(tensor)

            return Stream(dtype, lambda: self._streams.gather(shard, dtype))

        streams = {"parameters": stream(parameters, FLOAT32)}
        for key, tensors in states.items():
            dtype = stored_dtype([tensor.dtype for tensor in tensors.values()])
            of_parameters = [tensors.get(name) for name in self._trained]
            streams[f"{STATE_PIECES}{key}"] = stream(of_parameters, dtype)
        numbers: dict[str, Number] = {"index": self._done, "local_steps": self._done, "torch": text}
        begin, end = self._streams.own
        small = {} if self._world.rank else arrays
        return PartSource(self._names, self._shapes, end - begin, small, numbers, streams)

    @torch.no_grad()
    def _load(self, models: Sequence[StoredModel]) -> None:
        """Load the average of models, with buffers and the optimizer's state; collective."""
        reshard(fully_sharded(self._model))

        def begin() -> Any:
            mean = average([_small_state(model.small, model.numbers) for model in models])
            names = [model.state_names() for model in models]
            shared = {
                key: set.intersection(*(of_model.get(key, set()) for of_model in names))
                for key in names[0]
            }
            types = {
                key: np.result_type(*(model.state_dtype(key) for model in models)) for key in shared
            }
            return mean.arrays, mean.numbers, shared, types

        answers = self._on_all(lambda: None if self._world.rank else self._live.attempt(begin))
        arrays, numbers, shared, types = answers[0]
        size = max(SMALLEST_PIECE, PIECE // len(models))
        parameters = self._parameters

        def scatter(read: Callable[..., np.ndarray], tensors: Sequence[Any], dtype: Any) -> None:
            def mean(begin: int, end: int) -> np.ndarray:
                pieces = [read(model, begin, end) for model in models]
                return _mean([piece.astype(dtype, copy=False) for piece in pieces])

            def write(run: Run, values: torch.Tensor) -> None:
                if tensors[run.parameter] is not None:
                    shard = flat_shard(tensors[run.parameter])
                    shard[run.local : run.local + run.length].copy_(values)

            self._scatter(mean, write, dtype, size)

        scatter(StoredModel.parameters, parameters, FLOAT32)
        states: dict[str, Any] = {}
        for key, names in sorted(shared.items()):
            tensors = [
                self._state_tensor(name, key, types[key]) if name in names else None
                for name in self._trained
            ]

            def read(model: StoredModel, begin: int, end: int, key: str = key) -> np.ndarray:
                return model.state(key, begin, end)

            scatter(read, tensors, types[key])
            pairs = zip(self._trained, tensors, strict=True)
            states |= {f"torch/{name}/{key}": t for name, t in pairs if t is not None}
        put_buffers({0: self._buffers()}, _small_state(arrays, {}))
        text = str(numbers["torch"])
        saved, _ = read_optimizer(self._optimizer, self._model, text, arrays | states)
        # keep the learning rates and settings of this program
        now = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": saved["state"], "param_groups": now})

    def _state_tensor(self, name: str, key: str, dtype: np.dtype) -> Any:
        """Return the tensor of the optimizer's state for a parameter; create it if necessary."""
        parameter = self._trained[name]
        present = self._optimizer.state.get(parameter, {}).get(key)
        if is_sharded_like(present, parameter):
            return present
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return empty_shard(parameter, parameter.dtype if kind.is_floating_point else kind)

    @torch.no_grad()
    def _average(self, peer: PeerModel) -> None:
        """Average the parameters with a peer's model; collective.

        The elements are computed like by `live.correct_for_age` and `LoopMember`, one by one.
        """
        reshard(fully_sharded(self._model))
        parameters = self._parameters

        def read(begin: int, end: int) -> np.ndarray:
            values = peer.peer.parameters(begin, end)
            if peer.then is None:
                return values
            return (values - peer.then.parameters(begin, end)) / np.float32(1 + peer.late)

        def write(run: Run, values: torch.Tensor) -> None:
            shard = flat_shard(parameters[run.parameter])[run.local : run.local + run.length]
            now = shard.cpu().float().reshape(1, -1)
            other = values.reshape(1, -1)
            other = other if peer.then is None else now + other
            shard.copy_(weighted_sum((0.5, 0.5), [now, other], torch.empty_like(now))[0])

        self._scatter(read, write, FLOAT32, PIECE)

    def _scatter(
        self,
        read: Callable[[int, int], np.ndarray],
        write: Callable[[Run, torch.Tensor], None],
        dtype: np.dtype,
        size: int,
    ) -> None:
        """Scatter this rank's range; if a rank can't read it, raise its error on all ranks.

        Elements of windows that not all ranks could read are not written.
        """
        problems: list[Exception] = []

        def read_if_possible(begin: int, end: int) -> np.ndarray | None:
            try:
                return self._live.attempt(lambda: read(begin, end))
            except (OSError, StoreError, ValueError, FolderUnreachable) as error:
                problems.append(error)
                return None

        if self._streams.scatter(read_if_possible, write, dtype, size):
            return

        def fail() -> None:
            for problem in problems:
                raise problem

        self._on_all(fail)


def _small_state(arrays: dict[str, np.ndarray], numbers: dict[str, Number]) -> NodeState:
    """Return a state with small arrays only."""
    return NodeState(np.zeros(0, np.float32), (), (), arrays, numbers)


def _mean(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of pieces, as :func:`~mpigossip.runs.members.member.average` computes it."""
    if len(pieces) == 1 or not np.issubdtype(pieces[0].dtype, np.floating):
        return pieces[0]
    rows = [torch.from_numpy(np.ascontiguousarray(piece)).reshape(1, -1) for piece in pieces]
    mean = weighted_sum([1 / len(rows)] * len(rows), rows, torch.empty_like(rows[0]))
    return mean.numpy().reshape(-1)
