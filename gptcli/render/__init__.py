"""A report as a table, as JSON, as a file. Nothing is computed here."""
