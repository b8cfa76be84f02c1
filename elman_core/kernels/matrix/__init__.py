"""Recurrences whose state is a matrix for each head."""
