"""A run on the disk and on the terminal: its folder, the facts in its manifest, its protocol, its lines."""
