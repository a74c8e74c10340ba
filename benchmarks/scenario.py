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
    """A scenario's own are fields of a subclass: int, float, str, literals of str, or tuples of these.

    Numbers must be above 0, or not below it where a default is 0."""

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
            shown: Sequence[Any] = value if isinstance(value, tuple) else (value,)
            default = " ".join(map(str, shown))
            hint = _item_hint(type(self.full), field.name)
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=_reader(hint, may_be_zero=0 in shown),
                choices=typing.get_args(hint) or None,
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


def _item_hint(cls: type, name: str) -> Any:
    """A type, or a literal's."""
    hint = typing.get_type_hints(cls)[name]
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


def _reader(hint: Any, *, may_be_zero: bool) -> Callable[[str], Any]:
    if hint not in (int, float):
        return str

    def number(text: str) -> float:
        value: float = hint(text)
        if not (value > 0 or (may_be_zero and value == 0)):
            raise argparse.ArgumentTypeError(f"{text} is not {'at least' if may_be_zero else 'above'} 0")
        return value

    number.__name__ = hint.__name__  # which argparse calls what is no number by
    return number
