"""Dense recurrences: h_t = cell(W h_{t-1} + u_t, …)."""
