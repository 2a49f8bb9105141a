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
# With --requeue, Slurm also queues the job again if a host fails; training then resumes from its last
# checkpoint.
again() { scontrol requeue "$SLURM_JOB_ID"; }
# Time by which training must have ended, in seconds since 1970.
export MPIGOSSIP_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + @seconds@))}"
export OMP_NUM_THREADS=1

@environment@

@common@
