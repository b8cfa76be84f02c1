"""From single runs to comparisons. `size` finds the width that gives a number of parameters."""
