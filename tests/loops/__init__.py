"""A table of training loops that users write, times every method: two real workers against one plain process.

`job.py` is what a loop is written against, the files of `table/` hold the loops, `methods.py` the columns, `workers.py`
the processes, `verdict.py` what a cell is called, `known.py` the cells that are known to fail.
"""
