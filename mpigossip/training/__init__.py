"""Training of a job: copies of the model, precision, learning rates, evaluation and assembly."""
