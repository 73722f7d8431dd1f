"""Upcycling: a dense checkpoint becomes a MoTE whose experts are copies of its blocks."""
