"""Checkpoints: open, read, change and write model repositories."""
