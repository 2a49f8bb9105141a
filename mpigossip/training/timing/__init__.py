"""What steps take on a machine: its rates, the formulas, and the clock that runs carry."""
