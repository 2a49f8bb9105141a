# Training ends with exit code @stopped@ if it has stopped with a checkpoint before its end: after a
# signal, or shortly before the time limit. If this attempt has written a new checkpoint, the script
# queues the job again, even if a host has failed, and `train` resumes from that checkpoint. Without a
# new checkpoint, the next attempt would fail in the same way. Exit code @wrong@ is an error in the job.
run=@run@
newest() {
    local all=("$run"/checkpoints/step-*[0-9])
    echo "${all[-1]}"
}
before=$(newest)
code=0
@launcher@ @command@ || code=$?
if [ "$code" -eq 0 ]; then
    echo "batch: training has finished"
elif [ "$code" -eq @wrong@ ] || [ "$(newest)" = "$before" ]; then
    echo "batch: training ended with exit code $code; it is not tried again, because the job has an" \
        "error or there is no new checkpoint: see the messages above" >&2
    [ "$code" -ne @stopped@ ] || code=1
else
    echo "batch: training ended with exit code $code; the next attempt resumes from $(newest)"
    again && code=0
fi
exit "$code"
