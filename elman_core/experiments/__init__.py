"""From single runs to comparisons.

`suite` turns a TOML file into jobs, `jobs` runs them, `results` reads what they wrote. `size` finds the width or depth that
gives a number of parameters; `probe` measures the memory and speed of a training.
"""
