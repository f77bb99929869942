"""Optimizers over chunks: parameter groups, fused steps, learning rates, and the tiers that their state lies in."""
