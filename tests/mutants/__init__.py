"""Small faults put into the sources one at a time, each with the tests that must notice it.

`mutant.py` says what a row is, the files of `table/` hold the rows, `run.py` runs the tests over a changed copy.
"""
