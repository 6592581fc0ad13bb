"""The rows: one short function for each loop, by what is unusual about it."""
