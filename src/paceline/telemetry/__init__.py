"""A timeline of every step: what this worker computed, what travelled, and what it waited for.

Tracing is other classes in the same places: a Recorder and lanes that also keep spans on a tape, and hooks that only
look. Without it they are not made, and a step costs what it cost before. docs/trace.md says how to read the file.
"""
