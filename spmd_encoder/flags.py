"""How a flag is declared, and how its value is written on a command line and in the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from spmd_encoder.errors import StartupError

ZERO = (0, "")
"""The least value of a number that may be 0, too."""

_BOOLEANS = MappingProxyType(
    {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
)


def flag(
    default: Any,
    help: str,
    *,
    alias: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    per_rank: bool = False,
    fallback: str | None = None,
    least: tuple[float, str] | None = None,
) -> Any:
    """A field that is also a flag. `per_rank` fields may differ between ranks. `fallback` is a foreign variable that
    counts where neither the flag nor its own variable is given. `least`: a number's least value, and why it is that, or
    ""; a number without one must be positive."""
    meta = {"help": help, "alias": alias, "choices": choices, "per_rank": per_rank, "fallback": fallback}
    meta["least"] = least
    return dataclasses.field(default=default, metadata=meta)


def check_number(name: str, value: float, least: tuple[float, str] | None) -> None:
    """Raises StartupError (exit code 2) where the flag `name` may not have this value. NaN is below everything."""
    if least is None:
        if not value > 0:
            raise StartupError(f"{name} must be positive, not {value}", exit_code=2)
    elif not value >= least[0]:
        why = f": {least[1]}" if least[1] else ""
        raise StartupError(f"{name} must be at least {least[0]:g}, not {value}{why}", exit_code=2)


def check_host_names(name: str, hosts: Iterable[str]) -> None:
    """Raises StartupError (exit code 2) where the flag `name` was given what is no exact host name or address."""
    for host in hosts:
        if set(host) & set("/*@?#%[]\\") or host.count(":") == 1:
            raise StartupError(
                f"{name} takes exact host names, not {host!r}: no scheme, port, path or wildcard", exit_code=2
            )


def boolean(text: str) -> bool:
    """Raises ValueError where `text` says neither yes nor no."""
    if text.lower() not in _BOOLEANS:
        raise ValueError(text)
    return _BOOLEANS[text.lower()]


def words(text: str) -> tuple[str, ...]:
    """A list's entries, separated by commas or spaces."""
    return tuple(text.replace(",", " ").split())


def value_text(value: Any) -> str:
    """A value as it is written in a flag or variable."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


READERS: Mapping[type, Callable[[str], Any]] = MappingProxyType({bool: boolean, tuple: words})
"""What makes a value from its text, where that is not the type itself."""

ARITY: Mapping[type, Mapping[str, Any]] = MappingProxyType(
    {bool: {"nargs": "?", "const": True, "metavar": "true|false"}, tuple: {"nargs": "*", "metavar": "NAME"}}
)
"""In argparse's terms: a flag alone says true and may say more (`--flag=false`); a list takes any number of words."""
