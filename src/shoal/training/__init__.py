"""A step and what goes around it: forward, backward, reduction, ballot, clipping, update; evaluation and the loop."""
