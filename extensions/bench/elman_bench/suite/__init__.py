"""Suites: a TOML file of models, sizes, seeds and settings; the runs that it means; and the folder that holds them."""
