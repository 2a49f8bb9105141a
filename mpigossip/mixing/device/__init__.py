"""Exchange on GPUs: messages, their memory and streams, and the test that MPI can transfer it."""
