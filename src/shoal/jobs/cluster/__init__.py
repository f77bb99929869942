"""Jobs for schedulers: one job file, rendered for a local run, Slurm, Ray and Kubernetes, and looked after there."""
