"""Tests of federated training."""
