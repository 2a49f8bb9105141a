# Training exits with @stopped@ when it stopped before its end with a checkpoint: on a signal, or short
# of the time limit. After an attempt that brought a new checkpoint the job is queued again and goes
# on there, as `train` does on an existing run directory; also where a node was lost. An attempt
# without a new checkpoint would be repeated for ever, and @wrong@ is an error in the job.
run=@run@
newest() {
    local all=("$run"/checkpoints/step-*[0-9])
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
    echo "batch: ended with $code after $(newest); the next attempt goes on there"
    again && code=0
fi
exit "$code"
