"""What is measured of a step."""

from mutants.mutant import Mutant

ROWS = [
    Mutant(
        "what is waited after the backward is taken out of it",
        "telemetry/pace.py",
        "sum(waited[: lap.before[0]])",
        "sum(waited)",
        "unit/test_step_time.py",
    ),
    Mutant(
        "a pause in the computing counts as computing",
        "telemetry/pace.py",
        " - sum(paused[: lap.before[1]])",
        "",
        "unit/test_step_time.py",
    ),
    Mutant(
        "a wait inside a pause counts twice",
        "telemetry/pace.py",
        "        if lap is None or self._inside:\n            yield",
        "        if lap is None:\n            yield",
        "unit/test_step_time.py",
    ),
]
