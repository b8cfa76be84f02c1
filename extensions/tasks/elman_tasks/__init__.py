"""Tasks that show what a recurrence can do: generated on the fly, trained with the core's trainer, scored by length."""
