"""What one learns from runs and machines."""
