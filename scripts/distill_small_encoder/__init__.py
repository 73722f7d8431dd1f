"""Distil a sentence encoder that is small enough to live in a git repository (`__main__`)."""
