"""What a person sees of a run: its metrics, its progress line, its trackers, its timeline and its page."""
