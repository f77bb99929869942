"""The phases in which a model, a plan and ranks become an engine."""
