"""The commands `bench`, `compare`, `jobs`, `plot`, `probe`, `results` and `size`; heavy imports are inside the commands."""
