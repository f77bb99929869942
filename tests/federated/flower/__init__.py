"""Tests with Flower: what is in files named inside_* runs in a process that can import it."""
