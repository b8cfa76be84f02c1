"""From single runs to comparisons.

`suite` turns a TOML file into jobs, `jobs` runs them, `results` reads what they wrote. `probe` measures the memory and speed
of a training. `cli` has the commands.
"""

__version__ = "0.1.0"
