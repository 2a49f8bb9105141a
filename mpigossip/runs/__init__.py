"""Run of a job or a custom loop: log, checkpoints, stops, resume, rank failures and output.

Starting and resuming, in order; the functions without a module are in `start_and_resume`:

1. `resume` (command `resume`), or `train` if the run directory of the job contains a checkpoint,
   locks the run directory. `newest` selects the newest complete checkpoint on rank 0. `resume`
   takes the job from its manifest and applies the overrides; `train` checks that the job and the
   number of nodes are the same as in the manifest.
2. `run` builds the node of this process (model, graph and mixer), as for a new run. `job.train`
   opens the `Run` and calls `Run.resume`. A custom loop builds its node itself, and its call
   `optimizer.resume()` ends in `Run.resume`, too.
3. `Run.resume` calls `snapshot_and_restore.restore`, in which each process reads the files of its
   own nodes. It checks that the checkpoint belongs to the same model.
4. If the number of nodes, the function of the algorithm, the names and sizes of the states, and the
   names in the state of the cadence are the same as in the checkpoint, and `Node.resumes_exactly`
   is true (which depends on the number of slots or ranks per node), each node gets its own saved
   state. Unless the run is asynchronous, it then continues bitwise identically. Otherwise,
   `from_mean` sets each node to the average of all saved nodes, which rank 0 computes
   (`read_average`). The state of the algorithm is averaged or reset, and the graph starts again
   at round 0.
5. `Run.resume` then copies the flat parameters to the model (`Node.publish`) and continues to count
   seconds and samples. If each node got its own state, it stores the step as saved, so that the
   same checkpoint is not written again.

Nothing restores the position in the data of a job: its batches and random numbers follow from the
number of the step. A stream is read again from its beginning up to that step.
"""
