"""The job's side of a step: replicas, precision, learning rates, evaluation, assembly."""
