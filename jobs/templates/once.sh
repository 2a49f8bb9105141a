# The script does not queue the job again, because it knows no run directory of the program in which it
# could find a new checkpoint. `mpigossip job … --run DIR` writes a script that does.
# If the scheduler repeats the job because a host has failed, the program begins again, unless it resumes
# by itself.
code=0
@launcher@ @command@ || code=$?
echo "batch: the program ended with exit code $code"
exit "$code"
