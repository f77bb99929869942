"""Cuts found from a model's own graph, where no rules are known: one trace on fake tensors says which dims of which
parameters are the same thing, and so which layers can be cut together."""
