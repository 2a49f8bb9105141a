"""Training of a job: replicas, precision, learning rates, evaluation and assembly."""
