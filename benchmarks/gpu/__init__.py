"""Questions that need a GPU; each script checks, times and prints a table, with the packages of a plain PyTorch
image."""
