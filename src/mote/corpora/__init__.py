"""Corpora: embedded by any model; datasets of pairs with mined negatives, or filtered."""
