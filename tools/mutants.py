"""Mutation tests: insert one fault at a time into a copy of the code, whose tests must then fail.

    python tools/mutants.py                   run all mutants, and print a table at the end
    python tools/mutants.py --only flush nan  run those whose names contain one of the words
    python tools/mutants.py --list            list names, functions and tests

tests/mutation.py describes what a mutant is, and how it is judged. `python -m tests.double.mutants`
runs the mutants of the test double for GPUs.
"""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from tests.mutation import Mutant, main  # noqa: E402

# If the tests of a folder are slow, the file that tests the mutated module is run first.
WINDOWS = "mixing/test_windows.py", "mixing"
TRANSPORTS = "mixing/test_transports.py", "mixing"
WIRE = "mixing/test_wire.py", "mixing"
ASYNCHRONOUS = "mixing/test_asynchronous.py", "mixing"
SIMULATED = "mixing/test_simulated.py", "mixing"
RUN = "runs/test_run.py", "runs"
STEP = "engine/test_step.py", "engine"
FORMULAS = "algorithms/test_algorithms.py"
LIMITS = f"{FORMULAS}::test_limits_have_the_published_order", "algorithms"
QUASI_GLOBAL = f"{FORMULAS}::test_quasi_global_momentum_is_that_of_its_paper", "algorithms"
MEANS = f"{FORMULAS}::test_mean_is_preserved_and_consensus_reached", "algorithms"
LATER = f"{FORMULAS}::test_what_a_biased_wire_leaves_out_is_sent_later", "algorithms"
LISTING = f"{FORMULAS}::test_detag_is_the_listing_of_its_paper", "algorithms"
CADENCE = "algorithms/test_cadence.py", "algorithms"
RANKS = "groups/test_ranks.py", "groups"

MUTANTS = [
    # The exchange between nodes: notifications, flush, buffers, and the weighted sum.
    Mutant("notification of another round", "SharedOutboxes.publish",
           "READY, t)", "READY, t + 1)", WINDOWS),
    Mutant("flush left out", "Windows.notify",
           "window.Flush(rank)", "pass", TRANSPORTS),
    Mutant("notified before the flush", "Windows.notify",
           "for rank, _ in r.plan.targets:",
           "for rank, _ in r.plan.targets:\n"
           "    self.notifications.send([rank], ARRIVED, self.number(r, chunk))\n"
           "for rank, _ in ():",
           TRANSPORTS),
    Mutant("outbox reused before it was read", "ReadInPlace.release",
           "self._shared.wait_read(self.round.plan.readers, self.round.t)", "pass", WINDOWS),
    Mutant("inbox not double-buffered", "Windows.send",
           "half = r.index % 2", "half = 0", WINDOWS),
    Mutant("free buffer not waited for", "Windows.is_free",
           "return r.index < 2 or", "return True or", WINDOWS),
    Mutant("own weight wrong", "RoundPlan.of",
           "all_weights = float(own), *map(float, weights)",
           "all_weights = float(weights[0] if len(weights) else own), *map(float, weights)",
           WINDOWS),
    Mutant("order of a sum", "RoundPlan.of",
           "sources = tuple(map(int, nodes))", "sources = tuple(map(int, nodes[::-1]))",
           WINDOWS),
    Mutant("last column cut", "_half",
           "slice(middle, count)", "slice(middle, count - 1)", WINDOWS),
    Mutant("half of a pair not waited for", "average_pair",
           "self.wait_half(index, t)\nreturn", "return", WINDOWS),
    Mutant("random wire draws alike in every shard", "draw",
           "bits.advance(first // WIRE_BUCKET * count // 8)", "bits.advance(0)", WIRE),
    Mutant("last chunk not encoded", "write",
           "for begin in range(end_of_blocks, width, CHUNK):",
           "for begin in range(end_of_blocks, max(width - CHUNK, 1), CHUNK):", WIRE),
    Mutant("own messages not waited for", "Messages.release",
           "if self._sends:", "if False:", ("runs/test_survive.py", "mixing")),
    Mutant("simulated rows shifted", "_find_ranges",
           "slice((a + s) % n, (a + s) % n + b - a)", "slice(a, b)", SIMULATED),
    Mutant("plan of another round", "_plan_of",
           "t % self._period if self._period", "0 if self._period", WINDOWS),
    Mutant("torn copy used", "Asynchronous._is_complete",
           "return done == begun", "return done > 0", ASYNCHRONOUS),
    Mutant("counter read after the model left out", "Asynchronous._read",
           "begun = self._load(j, 8 * BEGUN)", "begun = done", ASYNCHRONOUS),
    Mutant("correction counted twice", "Asynchronous._apply_corrections",
           "if number == self._included[j]:", "if not number:", ASYNCHRONOUS),
    # A step, its counters and its state.
    Mutant("graph's clock counts global averages", "record",
           "self.round += now.kind is ExchangeKind.GOSSIP", "self.round += now.kind is not "
           "ExchangeKind.LOCAL",
           STEP),
    Mutant("resumed counter + 1", "restore_counters",
           'self.index = int(numbers["index"])', 'self.index = int(numbers["index"]) + 1', RUN),
    Mutant("NaN let through", "reject_non_finite",
           "if math.isfinite(total):", "if True:", STEP),
    Mutant("state of a node restored to row 0", "scatter_row",
           "part[row].copy_(pieces[shard])", "part[0].copy_(pieces[shard])", RUN),
    Mutant("slots not gathered", "fetch",
           "part.copy_(shards[other])", "pass", "groups"),
    Mutant("gradients summed, not averaged", "reduce_scatter_mean",
           "weights = [1 / self.slots] * self.slots", "weights = [1.0] * self.slots", "groups"),
    Mutant("shared-memory barrier passes early", "missing",
           "if count[0] < self._count]", "if count[0] < self._count - 1]", RANKS),
    # Formulas of algorithms, cadences and graphs.
    Mutant("momentum not averaged", "receive",
           "state.momentum.copy_(mixed[1])", "state.momentum.copy_(sent[1])", LIMITS),
    Mutant("quasi-global momentum without the rate", "receive",
           "alpha=mu / step.lr)", "alpha=mu)", QUASI_GLOBAL),
    Mutant("skipped row makes its step", "adapt",
           "for row in range(len(x)) if row not in step.skipped]", "for row in range(len(x))]",
           ("algorithms/test_steps_by_node.py", "algorithms")),
    Mutant("Adam's bias corrected by all steps", "adapt",
           "step._replace(index=counts[row], skipped", "step._replace(skipped", STEP),
    Mutant("CHOCO without its memory", "receive",
           "state.memory.add_(mixed[0])", "state.memory.copy_(mixed[0])", MEANS),
    Mutant("error feedback forgets", "error_feedback.receive",
           "state.error.sub_(sent[0])", "state.error.zero_()", LATER),
    Mutant("DeTAG's phase one short", "receive",
           "if r == phase - 1 and not step.waits:", "if r == max(phase - 2, 0):", LISTING),
    Mutant("period off by one", "_each",
           "others if (index + 1) % period else last", "others if index % period else last",
           CADENCE),
    Mutant("ADPSGD's thresholds exchanged", "observe",
           "period += (ratio < low * state.level) - (ratio > high * state.level)",
           "period -= (ratio < low * state.level) - (ratio > high * state.level)", CADENCE),
    Mutant("a fragment's turn too early", "due",
           "position = index % self.period + 1", "position = (index + 1) % self.period + 1",
           "engine"),
    Mutant("one peer from the other side", "from_behind",
           "tuple(n - d for d in distances)", "distances", "graphs"),
    Mutant("receivers are the senders", "receivers",
           "return (j - self._offsets) % self.n", "return (j + self._offsets) % self.n", "graphs"),
    # Order and partition of the data.
    Mutant("another epoch, the same order", "draw_together",
           "outdated[0].seed, ORDER, epoch", "outdated[0].seed, ORDER, 0", "data"),
    Mutant("seed + 1", "partition",
           "order = permutation(len(labels), seed, SPLIT)",
           "order = permutation(len(labels), seed + 1, SPLIT)", "data"),
    # Checkpoints, logs, and runs that resume.
    Mutant("checkpoint under its final name at once", "begin",
           'temporary = folder(run, step).with_suffix(".writing")',
           "temporary = folder(run, step)", "store"),
    Mutant("checksum not compared", "_check_bytes",
           "if checksum != entry.checksum:", "if False:", "store"),
    Mutant("pending changes of a log forgotten", "recover",
           "if change is not None and path.exists(): _apply(path, *change)", "pass",
           "store"),
    Mutant("elastic resume drops momentum", "AVERAGED",
           'AVERAGED = {"momentum", "first", "second"}', "AVERAGED = set()", RUN),
    Mutant("the oldest checkpoint of two is kept", "prune",
           "for step, path in complete[:-keep]", "for step, path in complete[keep:]", "store"),
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(MUTANTS, __doc__))
