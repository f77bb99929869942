"""Tiers: masters and optimizer state lie on the device, on the host or on a disk between steps."""
