# Training exits with @stopped@ when it stopped before its end with a checkpoint: on a signal, or short
# of the time limit. A life that brought a new checkpoint is worth another, which goes on there, as
# `train` does on an existing run directory; so is one that lost a node. A life without a new
# checkpoint would be repeated for ever, and @wrong@ is a mistake in the job.
run=@run@
newest() {
    local all=("$run"/checkpoints/step-*)
    echo "${all[-1]}"
}
before=$(newest)
code=0
@launcher@ mpigossip train @arguments@ || code=$?
if [ "$code" -eq 0 ]; then
    echo "batch: training is done"
elif [ "$code" -eq @wrong@ ] || [ "$(newest)" = "$before" ]; then
    echo "batch: ended with $code and without a new checkpoint; not tried again" >&2
    [ "$code" -ne @stopped@ ] || code=1
else
    echo "batch: ended with $code after $(newest); going on there in the next life"
    again && code=0
fi
exit "$code"
