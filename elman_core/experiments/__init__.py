"""From single runs to comparisons.

`size` finds the width that gives a number of parameters. `runs`, `metrics` and `results` read run folders into tables,
`compare` and `statistics` pair them, `report` makes a page of a suite; none of these needs torch.
"""
