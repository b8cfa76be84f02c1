"""The commands `bench`, `compare`, `jobs`, `plot`, `probe` and `results`; heavy imports are inside the commands."""
