#!/bin/bash
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=@ranks@
#SBATCH --time=@clock@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@name@-%j.out
@directives@
# @title@: @tried@.
# Made by `mpigossip job`.
# @shape@
# --requeue also repeats the job when a node fails; it then goes on from the last checkpoint that
# training wrote.
again() { scontrol requeue "$SLURM_JOB_ID"; }
# seconds since 1970 at which training must have ended
export MPIGOSSIP_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + @seconds@))}"
export OMP_NUM_THREADS=1

@environment@

@common@
