"""Plots, reports, predictions and diagnostics of runs and machines."""
