"""The outputs of a run for people: metrics, the progress line, trackers, the timeline and the report page."""
