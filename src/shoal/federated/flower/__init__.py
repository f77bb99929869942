"""Shoal's clients under Flower (https://flower.ai): its strategies, over a grid in this process or any other of its."""
