"""The rows: one file for each folder of the sources, and one for the faults that survived when this was begun."""
