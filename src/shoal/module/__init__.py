"""The module as a rank trains it: built, made alike, compiled, recomputed, with its randomness and its buffers."""
