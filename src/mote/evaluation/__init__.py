"""Scores of any embedding model on the task types of MTEB."""
