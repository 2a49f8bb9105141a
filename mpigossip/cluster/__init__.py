"""MPI start-up (`ranks`), checks of the launcher (`launcher`), and batch scripts (`batch`)."""
