"""Access to the memory of other ranks through an MPI window: atomic words, and plain bytes.

A protocol that uses this module distinguishes two kinds of memory. Words of 8 bytes are accessed by
accumulate calls only, which MPI makes atomic for each word. All other bytes are read and written
without atomicity. The protocol therefore has to make sure, by its words, that a rank uses no bytes
that another rank writes at the same time.
"""

import numpy as np
from mpi4py import MPI

from mpigossip.mixing.exact_average import CUT

HINTS = {"acc_single_intrinsic": "true"}
"""Hints for the window, which promise that each accumulate call accesses one word. Without this
promise, Open MPI over UCX completes such a call only while the target rank is inside MPI: a rank
that computes for a long time would delay all ranks that access its window."""


class WindowAccess:
    """Base class of objects with an MPI window: methods that access the memory of other ranks.

    Only one thread at a time may call them. Each method flushes the window before it returns, so
    that its access is complete at the other rank.
    """

    _window: MPI.Win

    def _replace(self, j: int, offset: int, value: int) -> None:
        """Set a word in rank j's window atomically, and wait until it is set there.

        :param j: rank whose window is written
        :param offset: offset in the window, in bytes
        :param value: new value, an int64
        """
        word = np.array([value], np.int64)
        self._window.Accumulate([word, MPI.INT64_T], j, [offset, 1, MPI.INT64_T], MPI.REPLACE)
        self._window.Flush(j)

    def _load(self, j: int, *offsets: int) -> np.ndarray:
        """Load words from rank j's window, each atomically, and before any later load.

        :param j: rank whose window is read
        :param offsets: offset of each word in the window, in bytes
        :return: the words, as int64
        """
        self._window.Sync()
        words = np.zeros(len(offsets), np.int64)
        unused = np.zeros(1, np.int64)
        for i, offset in enumerate(offsets):
            result = [words[i : i + 1], MPI.INT64_T]
            self._window.Fetch_and_op([unused, MPI.INT64_T], result, j, offset, MPI.NO_OP)
        self._window.Flush(j)
        self._window.Sync()
        return words

    def _swap_word(self, j: int, offset: int, value: int) -> int:
        """Set a word in rank j's window, and return the word that was there, in one atomic step.

        :param j: rank whose window is changed
        :param offset: offset in the window, in bytes
        :param value: new value, an int64
        """
        self._window.Sync()
        words = np.array([value, 0], np.int64)
        new, old = [words[:1], MPI.INT64_T], [words[1:], MPI.INT64_T]
        self._window.Fetch_and_op(new, old, j, offset, MPI.REPLACE)
        self._window.Flush(j)
        self._window.Sync()
        return int(words[1])

    def _get(self, into: np.ndarray, j: int, offset: int) -> None:
        """Read bytes from rank j's window, by MPI calls of at most ``CUT`` bytes.

        :param into: uint8 array for the bytes
        :param j: rank whose window is read
        :param offset: offset of the first byte in the window
        """
        for begin in range(0, into.size, CUT):
            part = into[begin : begin + CUT]
            self._window.Get([part, MPI.BYTE], j, [offset + begin, part.size, MPI.BYTE])
        self._window.Flush(j)

    def _put(self, source: np.ndarray, j: int, offset: int) -> None:
        """Write bytes to rank j's window, by MPI calls of at most ``CUT`` bytes.

        :param source: uint8 array of the bytes
        :param j: rank whose window is written
        :param offset: offset of the first byte in the window
        """
        for begin in range(0, source.size, CUT):
            part = source[begin : begin + CUT]
            self._window.Put([part, MPI.BYTE], j, [offset + begin, part.size, MPI.BYTE])
        self._window.Flush(j)
