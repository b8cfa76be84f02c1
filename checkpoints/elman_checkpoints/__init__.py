"""Trained models, one in each folder beside this file. `pretrained/NAME` finds them without importing this package."""
