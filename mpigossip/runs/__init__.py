"""Run of a job or a custom loop: log, checkpoints, stops, resume, rank failures and output."""
