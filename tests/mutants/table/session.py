"""What a process holds between calls of `prepare`."""

from mutants.mutant import Mutant

ROWS = [
    Mutant(
        "what the loop's variables hold stays",
        "session/retry.py",
        "        _detach(x)\n",
        "        pass\n",
        "laws/test_retry.py::test_nothing_that_the_body_computed_stays_alive",
    ),
    Mutant(
        "what an error's cause holds stays",
        "session/retry.py",
        "seen = seen.__cause__ or seen.__context__",
        "seen = None",
        "laws/test_retry.py::test_nothing_that_the_body_computed_stays_alive",
    ),
]
