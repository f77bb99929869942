"""Optimizers over chunks: groups, fused steps, learning rates, and where their state lives."""
