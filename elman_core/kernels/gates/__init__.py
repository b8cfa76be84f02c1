"""Gated recurrences: several products of the same h in every step, as of LSTM and GRU."""
