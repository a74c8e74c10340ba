"""What a scenario is, and how its options become flags."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from benchmarks.report import Report


@dataclass(frozen=True, kw_only=True)
class Options:
    """A scenario's own are fields of a subclass: int, float, str, or tuples of str or int."""

    device: str = "cpu"


O = TypeVar("O", bound=Options)  # noqa: E741


@dataclass(frozen=True, kw_only=True)
class Scenario(Generic[O]):
    """`quick` says what `--quick` measures: enough to see that it works, too little to believe its numbers."""

    name: str
    about: str
    full: O
    quick: O
    run: Callable[[O], Report]

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        for field in dataclasses.fields(self.full):
            value = getattr(self.full, field.name)
            default = " ".join(map(str, value)) if isinstance(value, tuple) else value
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=_item_type(type(self.full), field.name),
                nargs="+" if isinstance(value, tuple) else None,
                help=f"default: {default}",
            )

    def options(self, given: argparse.Namespace, *, quick: bool) -> O:
        """The defaults with what was given in their place."""
        values = {f.name: getattr(given, f.name, None) for f in dataclasses.fields(self.full)}
        changes: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None
        }
        return dataclasses.replace(self.quick if quick else self.full, **changes)

    def command(self, options: O, *, quick: bool) -> list[str]:
        """What measures the same again."""
        base = self.quick if quick else self.full
        words = ["python", "-m", "benchmarks", self.name, *(["--quick"] if quick else [])]
        for field in dataclasses.fields(base):
            value = getattr(options, field.name)
            if value != getattr(base, field.name):
                shown: Sequence[Any] = value if isinstance(value, tuple) else (value,)
                words += ["--" + field.name.replace("_", "-"), *map(str, shown)]
        return words


def _item_type(cls: type, name: str) -> Callable[[str], Any]:
    hint = typing.get_type_hints(cls)[name]
    found: Callable[[str], Any] = (typing.get_args(hint) or (hint,))[0]
    return found
