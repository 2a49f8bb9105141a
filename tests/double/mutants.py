"""Mutants for the test double: each lacks one wait, event or order.

    python -m tests.double.mutants                run all mutants
    python -m tests.double.mutants --only NCCL    run those whose names contain the word
    python -m tests.double.mutants --table        print the rows of MUTANTS.md

With the fault, a training or an exchange on the double has to fail: with an unordered access, wrong
bits, or an error. tests/mutation.py describes what a mutant is, and how it is judged.
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.double.__main__ import environment
from tests.mutation import REPO, Mutant, main, planted

__all__ = "MUTANTS", "REPO", "planted"

BUFFERS = "mpigossip.mixing.device.buffers"
STREAMS = "mpigossip.mixing.device.streams"
MIXER = "mpigossip.mixing.synchronous"
PIPELINE = "mpigossip.mixing.pipeline"
WINDOWS = "mpigossip.mixing.transports.windows"
NCCL = "mpigossip.groups.nccl_inside_node"
NCCL_NODES = "mpigossip.mixing.transports.nccl_between_nodes"
MESSAGES = "mpigossip.mixing.transports.messages"
PROOF = "mpigossip.mixing.device.proof"
KERNELS = "mpigossip.mixing.kernels.gpu_sum"
LOADER = "mpigossip.data.loader"
CAPTURE = "mpigossip.training.capture"
PROBE = "mpigossip.mixing.transports.probe"
GROUPS = "mpigossip.cluster.process_groups"
FAILURES = "double/test_failures.py"
LOOPS = "double/test_loops.py"
REFUSED = f"{LOOPS}::test_windows_are_refused_without_cupy_and_auto_takes_another_way"
SOON = (
    f"{FAILURES}::test_nccl_that_fails_or_hangs_is_named_within_the_deadline"
    "[lost:3-was lost during]"
)
"""It has a time limit of 2 s."""
TRAINING = "double/test_training.py::test_two_ranks_of_two_devices_have_the_cpus_bits"
ENCODED = "double/test_training.py::test_every_wire_has_the_cpus_bits[top-k-windows]"
"""The encoded message is made after the search for NaN, which waits for the device."""
DELAYED = "mixing/test_windows.py::test_windows_equal_the_simulator_under_random_delays[4-put]"
HOST = f"{TRAINING}[host]"
DEVICE = f"{TRAINING}[windows]"
NODES = "double/test_training.py::test_windows_by_nccl_equal_the_simulator[3-bf16]"
NODES_FP32 = NODES.replace("3-bf16", "4-fp32")
KERNEL = "double/test_training.py::test_a_kernel_runs_where_its_arrays_are"
AUTO = "groups/test_groups.py::test_auto_becomes_devices_and_ranks_a_node"
OVERWRITTEN = (
    "double/test_training.py"
    "::test_a_result_is_read_before_it_is_overwritten_and_copies_use_locked_memory"
)
BUCKETS = "double/test_nccl.py::test_a_sum_in_buckets_has_the_cpus_bits[2-1]"
OVERLAP = "mpigossip.engine.buckets"
OVERLAPPED = (
    "double/test_backward_average.py::test_both_orders_of_a_sum_have_the_bits_of_two_slots[slots]"
)
LATE = (
    "double/test_backward_average.py"
    "::test_averages_that_have_begun_wait_for_a_late_rank_as_long_as_the_barrier"
)
FUSED = (
    "double/test_adamw_step.py"
    "::test_one_rank_without_a_right_kernel_leaves_the_formula_on_all[of_nodes-different]"
)
REPLAYED = "test_gpu.py::test_captured_replicas_train_as_eager_ones"
EAGER = "test_gpu.py::test_a_model_that_waits_for_the_gpu_trains_eagerly"
MUTANTS = [
    Mutant("no wait for the outbox before others read it", BUFFERS, "_wait(self._ready)", "pass",
     ENCODED),
    Mutant("no wait for a chunk's copy to the host", BUFFERS, "_wait(self._copied[chunk.number])",
     "_wait(self._ready)", HOST),
    Mutant("nothing waits for the copies of an average through host memory", BUFFERS,
     "_wait(self._copy_out(self._own,", "_ = (self._copy_out(self._own,", HOST),
    Mutant("copies out before the outbox is filled", STREAMS,
     "for stream in (self.out, self.into) if event else ():",
     "for stream in (self.into,) if event else ():",
     ENCODED.replace("top-k-windows", "bf16-host")),
    Mutant("nothing waits for the copies into a buffer", STREAMS,
     "if (event := _behind(self.into)) is not None:\n            event.synchronize()", "pass",
     DEVICE),
    Mutant("the event behind a copy is on the wrong stream", STREAMS, "_behind(self.out)",
     "_behind(self.into)", HOST),
    Mutant("the event behind the step's work is never recorded", STREAMS, "event.record(stream)",
     "pass", ENCODED),
    Mutant("the step goes on before NCCL is done", NCCL,
     "            work.wait()\n            return", "            return", DEVICE),
    Mutant("one slot's NCCL call is left out", NCCL, "self.run(work)",
     "self.run(lambda k: work(k) if k else None)", SOON),
    Mutant("NCCL calls of several slots without the lock", NCCL,
     "with launch_lock if self._on_gpus else nullcontext():\n                self.run(work)",
     "with nullcontext():\n                self.run(work)", DEVICE),
    Mutant("NCCL between nodes begins before the outbox is filled", BUFFERS,
     "slot_streams.follow(event)", "pass", NODES),
    Mutant("an average by NCCL is used before its sums are over", PIPELINE,
     "self._buffers.complete()  # the thread", "pass  # the thread", NODES_FP32),
    Mutant("a node receives before the others send", GROUPS,
     "        group.send([memory], j, 0)\n    return [group",
     "        pass\n    return [group", NODES),
    Mutant("a bucket of the sum inside a node is received into memory that is still read", NCCL,
     "memories[number % 2]", "memories[0]", BUCKETS),
    Mutant("a bucket is summed before it has arrived", NCCL,
     "            for work in works:\n                self._wait(k, work)\n            terms",
     "            terms", BUCKETS),
    Mutant("an average begins before the gradients of its bucket exist", OVERLAP,
     "len(self._buckets) and not self._missing[self._started]", "len(self._buckets)", OVERLAPPED),
    Mutant("an average during the backward pass doesn't wait for the gradients", NCCL,
     "self._side.wait_stream(torch.cuda.current_stream(device))", "pass", OVERLAPPED),
    Mutant("an update doesn't wait for the averages of the backward pass", NCCL,
     "torch.cuda.current_stream(self.devices[0]).wait_stream(self._side)", "pass", OVERLAPPED),
    Mutant("a module doesn't wait until its parameters are gathered", OVERLAP,
     "self.wait(indices)", "pass", OVERLAPPED),
    Mutant("a rank that is late in a backward pass has one time limit", NCCL,
     "self._works, all_arrived=False", "self._works", LATE),
    Mutant("each rank decides alone on the fused AdamW", "mpigossip.algorithms.adamw_step",
     "world.broadcast(world.gather(trials))", "[trials]", FUSED),
    Mutant("sums don't wait for NCCL", NCCL_NODES, "work.wait()  # holds", "pass  # holds", NODES),
    Mutant("a batch is used before its copy", LOADER, "compute.wait_event(copy.copied)",
     "pass", DEVICE),
    Mutant("a capture begins before the batches are there", CAPTURE, "side.wait_stream(current)",
     "pass", REPLAYED),
    Mutant("a replay's first use before the capture's stream is done", CAPTURE,
     "current.wait_stream(side)", "pass", REPLAYED),
    Mutant("what came by the network isn't flushed", WINDOWS,
     "            if self.on_device:\n                flush_rdma_writes(device)\n", "", DEVICE),
    Mutant("what came by messages isn't flushed", BUFFERS,
     "            for slot_streams in self._streams if into else ():\n"
     "                flush_rdma_writes(slot_streams.device)\n", "", DEVICE),
    Mutant("a put while another device is current", WINDOWS,
     "with device_context(self._devices[slot]):\n            for begin in range(span",
     "if True:\n    for begin in range(span", DEVICE),
    Mutant("a message while another device is current", MESSAGES,
     "with device_context(device):\n                for begin in range(span",
     "if True:\n    for begin in range(span", DEVICE.replace("windows", "messages")),
    Mutant("the test of GPU memory while another device is current", PROOF,
     "with device_context(device):\n                    step(", "if True:\n    step(", DEVICE),
    Mutant("a kernel while another device is current", KERNELS,
     "with torch.cuda.device(out.device), cupy", "with cupy", KERNEL),
    Mutant("NCCL calls while another device is current", "mpigossip.groups.threads",
     "        self._make_current(slot)\n", "", SOON),
    Mutant("the notification that a neighbour's message is there isn't waited for", WINDOWS,
     "return self.notifications.arrived(source, ARRIVED, self.number(r, chunk))", "return True",
     DELAYED),
    Mutant("the notification that a buffer is free isn't waited for", WINDOWS,
     "return r.index < 2 or", "return True or", HOST),
    Mutant("an average by messages begins before it is on the device", BUFFERS,
     "            self.complete()\n            waited", "            waited", DEVICE),
    Mutant("a failed capture leaves its stream current", CAPTURE, "torch.cuda.set_stream(current)",
     "pass", EAGER),
    # what issue 4/7 says would break at the first contact with GPUs, by its rows
    Mutant("1: a probe that fails ends the job", PROBE,
     "            refused.setdefault(str(error), []).append(name)\n    opened = None",
     "            raise\n    opened = None",
     f"{FAILURES}::test_an_exchange_goes_another_way_with_the_same_bits[put-auto-True-MPI_ERR_RMA"
     "_RANGE]"),
    Mutant("1: ranks don't agree on what a probe found", "mpigossip.mixing.progress_thread",
     "results = with_timeout(comm, 2 * limit_s).allgather((waits, problem))", "results = [(waits, "
     "problem)]",
     f"{FAILURES}::test_what_fails_on_one_rank_is_refused_on_all_at_once"),
    Mutant("1: calls that hang are left on the device", PROBE, "transport.abandon()", "pass",
     "double/test_nccl.py::test_nccl_that_cannot_be_had_is_refused_or_left"
     "[hang-cuda:{rank}-a round of nccl failed: round 0: NCCL has not]"),
    Mutant("a slot that does not finish on a CPU has no limit", "mpigossip.groups.threads",
     "min(SLOT_FRACTION * timeout_s, threading.TIMEOUT_MAX)", "threading.TIMEOUT_MAX",
     "groups/test_groups.py::test_a_slot_that_does_not_finish_is_named_in_time"),
    Mutant("2: messages of GPU memory are never tried", PROBE,
     'TRANSPORTS = "windows", "messages", "nccl", "host"',
     'TRANSPORTS = "windows", "nccl", "host"', REFUSED),
    Mutant("3: the progress thread has no context", "mpigossip.mixing.progress_thread",
     "torch.cuda.mem_get_info(self._device)", "pass", DEVICE),
    Mutant("4: another thread's CUDA calls without NCCL's lock", STREAMS,
     "with launch_lock, device_context(self.device), torch.cuda.stream(self.into):",
     "with device_context(self.device), torch.cuda.stream(self.into):", HOST),
    Mutant("4: launch blocking is let through", GROUPS, "if refused and any(", "if False and any(",
     f"{FAILURES}::test_launch_blocking_is_refused_with_its_remedy"),
    Mutant("5: nodes share a server", GROUPS, "node.broadcast(port)", "world.broadcast(port)",
     f"{LOOPS}::test_fsdp2_inside_nodes_has_the_bits_of_full_models"),
    Mutant("6: windows of GPU memory are created without a limit", WINDOWS,
     "run_on_all_ranks(comm, open_all, lambda: CREATING, limit_s, devices[0], keep)", "open_all()",
     f"{FAILURES}::test_a_probe_that_fails_or_hangs_on_one_of_three_ranks_leaves_the_next_way"
     "[window-no windows: MPI_ERR_RMA_RANGE]"),
    Mutant("6: MPI is finalized though a thread stands in it", "mpigossip.cluster.process",
     "if action is Action.SKIP_FINALIZE:", "if False:",
     "cluster/test_leaving.py::test_a_thread_left_in_a_call_of_mpi_changes_no_exit_code"),
    Mutant("6: others aren't told of a call that failed", "mpigossip.mixing.progress_thread",
     "for rank in others if problem and not waits]", "for rank in others if False]",
     f"{FAILURES}::test_a_probe_that_fails_or_hangs_on_one_of_three_ranks_leaves_the_next_way"
     "[window-no windows: MPI_ERR_RMA_RANGE]"),
    Mutant("7: a transport that works is taken to be fast", PROBE,
     'times.get("windows", float("inf")) <= AS_FAST * times[best]', '"windows" in times',
     "mixing/device/test_windows.py"
     "::test_the_fastest_way_is_taken_and_windows_where_nearly_as_fast"),
    Mutant("8: host memory isn't locked", PROBE, "reason = buffers.pin(transport.memory)",
     'reason = ""',
     f"{FAILURES}::test_an_exchange_goes_another_way_with_the_same_bits[pin-host-False-cudaHost"
     "Register]"),
    Mutant("8: batches are copied from pageable memory", LOADER,
     "pinned = map_tensors(Tensor.pin_memory, batch)", "pinned = batch", TRAINING + "[host]"),
    Mutant("8: copies out keep the host waiting", BUFFERS,
     "target[span].copy_(source[span], non_blocking=True)", "target[span].copy_(source[span])",
     HOST),
    Mutant("9: GPUs that the launcher has dealt out are divided again",
     "mpigossip.cluster.local_devices",
     "count if ranks == 1 or assigned else max(1, count // ranks)",
     "count if ranks == 1 else max(1, count // ranks)", AUTO),
    Mutant("9: Flux's ranks of a host aren't known", "mpigossip.cluster.local_devices",
     "if all(value.isdigit() for value in flux):", "if False:", AUTO),
    Mutant("9: the first job trains on CPUs", "mpigossip.config.sections",
     'devices: Devices = "auto"', 'devices: Devices = "cpu:1"',
     "double/test_training.py::test_the_first_job_takes_the_gpus"),
    Mutant("10: memory that UCX has locked counts as not", "mpigossip.mixing.device.memory",
     "if code == ALREADY and all(", "if False and all(",
     "mixing/device/test_windows.py::test_memory_that_ucx_has_locked_is_pinned[True]"),
    Mutant("10: memory that can't be locked ends the job", BUFFERS, "return str(error)", "raise",
     f"{FAILURES}::test_an_exchange_goes_another_way_with_the_same_bits[pin-host-False-cudaHost"
     "Register]"),
    Mutant("13: a result is overwritten while another stream reads it", MIXER,
     "self._buffers.record_reader()", "pass", f"{OVERWRITTEN}[messages]"),
    Mutant("13: memory of averages isn't locked", BUFFERS,
     "[self.host.own, self.host.memory, *", "[self.host.own, *", f"{OVERWRITTEN}[host]"),
]  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as compiled:
        os.environ.update(environment(Path(compiled)), PYTEST_ADDOPTS="--all")
        sys.exit(main(MUTANTS, __doc__))
