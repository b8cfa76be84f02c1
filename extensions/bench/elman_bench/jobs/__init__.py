"""Jobs: each runs once, on a free GPU of this machine or of a Ray cluster, whatever happens to the scheduler."""
