#!/bin/bash
#PBS -N @name@
#PBS -l select=@nodes@@chunk@:mpiprocs=@ranks@
#PBS -l walltime=@clock@
#PBS -j oe
#PBS -k oed
#PBS -r y
@directives@
# @title@: @tried@.
# Made by `mpigossip job`.
# @shape@
cd "$PBS_O_WORKDIR" || exit 1
NODES=@nodes@
# Users can't requeue a running job with this scheduler, so the script submits itself again.
again() { qsub "$0"; }
# Time by which training must have ended, in seconds since 1970. PBS only states the time limit.
export MPIGOSSIP_END_TIME="$(($(date +%s) + @seconds@))"
export OMP_NUM_THREADS=1

@environment@

@common@
