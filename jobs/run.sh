#!/usr/bin/env bash
# A script that trains by mpirun, without a scheduler:
#   bash run.sh 4 digits [section.key=value …]
# If a run crashes, for example because a rank fails, it is started again from its last checkpoint,
# at most TRIES times (default 3). A run that is stopped by Ctrl-C, a signal or `touch RUN/STOP` is
# not started again; the same command continues it. The variable MPIRUN replaces the launcher, for
# example MPIRUN='mpirun --hostfile hosts'.
nodes=${1:?pass the number of nodes, then the job file} job=${2:?pass the job file after the number}
shift 2
read -ra launcher <<<"${MPIRUN:-mpirun}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
stopped=
trap 'stopped=1' INT TERM
for ((try = 1; try <= ${TRIES:-3}; try++)); do
    code=0
    "${launcher[@]}" -n "$nodes" mpigossip train "$job" "$@" || code=$?
    case $code in
    0 | 2 | 75) break ;; # finished, an error in the job, or stopped with a checkpoint
    esac
    [ -z "$stopped" ] || break
    echo "run.sh: try $try ended with $code" >&2
done
exit "$code"
