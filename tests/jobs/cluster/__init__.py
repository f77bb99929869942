"""Jobs for schedulers."""
