"""Exchange on GPUs: messages, their memory and streams, and the proof that MPI moves it."""
