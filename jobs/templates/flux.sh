#!/bin/bash
#flux: --job-name=@name@
#flux: --nodes=@nodes@
#flux: --exclusive
#flux: --time-limit=@seconds@s
#flux: --output=@name@-{{id}}.out
@directives@
# @title@: @tried@.
# Made by `mpigossip job`.
# @shape@
NODES=@nodes@
# This script runs in its own Flux instance, so the next attempt is submitted to the parent instance.
again() { flux --parent batch "$0"; }
# Time by which training must have ended, in seconds since 1970.
export MPIGOSSIP_END_TIME="$(($(date +%s) + @seconds@))"
export OMP_NUM_THREADS=1

@environment@

@common@
