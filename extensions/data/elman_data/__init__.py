"""Texts as people have them, packed into one file that training maps into memory: the command `elman data pack`."""
