"""How many examples a property is tried with: a few in every run, more in `make fuzz`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

_USUAL = 100
"""Hypothesis' own number, which the profile of every run has."""


def examples(count: int, **others: Any) -> settings:
    """For a property that takes another number of examples than the usual one. A profile that has more of these has
    as many times more of it; `settings(max_examples=...)` would be the same number in all of them."""
    return settings(max_examples=_scaled(count), deadline=None, **others)


def within(seconds: float) -> pytest.MarkDecorator:
    """How long a test with `examples` may take, and as many times longer where it tries more of them."""
    return pytest.mark.timeout(_scaled(seconds))


def _scaled(number: float) -> int:
    return round(number * settings().max_examples / _USUAL)
