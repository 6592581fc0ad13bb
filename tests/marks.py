"""Which cases of a test wait for `make test-slow`: `[slow(2), 3, slow(4)]` leaves `make test` a team of three."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of a parametrised test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
