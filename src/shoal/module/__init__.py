"""The module as a rank trains it: built, made equal on all ranks, compiled, recomputed, with its randomness and its
buffers."""
