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
# this script runs in an instance of its own: the next attempt goes to the one that started it
again() { flux --parent batch "$0"; }
# seconds since 1970 at which training must have ended
export MPIGOSSIP_END_TIME="$(($(date +%s) + @seconds@))"
export OMP_NUM_THREADS=1

@environment@

@common@
