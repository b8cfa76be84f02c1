"""Results: run folders as tables, comparisons, pictures and a report. None of it needs torch."""
