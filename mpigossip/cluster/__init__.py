"""The machine: MPI start-up (`ranks`), the launcher's check (`launcher`), job scripts (`batch`)."""
