"""A job as parameter servers and workers: the server deals samples, keeps the weights and the run's directory; workers
compute gradients."""
