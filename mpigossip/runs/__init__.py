"""One run of a job or a custom loop: log, checkpoints, stops, resume, rank failures, output."""
