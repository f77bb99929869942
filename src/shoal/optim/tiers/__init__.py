"""Where weights and the state of optimizers live between steps: on the device, on the host, on disk."""
