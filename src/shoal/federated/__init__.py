"""Federated learning: clients train on samples that stay with them, a server brings their movements together.

What is here needs no other package. Importing it does not import torch; its files do.
"""
