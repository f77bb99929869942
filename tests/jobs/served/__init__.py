"""Jobs of parameter servers and workers."""
