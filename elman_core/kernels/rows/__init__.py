"""Matrix states whose rows share one matrix, with one kernel in each direction (`RowsKernel`)."""
