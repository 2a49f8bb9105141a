"""Averages and windows of arrays that a program owns, without an optimizer."""
