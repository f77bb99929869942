"""`shoal fed`: from a job file with a table `[federated]` to a finished run."""
