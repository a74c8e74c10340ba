"""Flags and their environment twins."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spmd_encoder.config import (
    DEFAULT_MODEL,
    ENV_PREFIX,
    Config,
    ParallelConfig,
    cache_dir,
    env_name,
    flag_fields,
    flag_name,
    flags_table,
    parse_config,
    validate_layout,
)
from spmd_encoder.errors import StartupError
from spmd_encoder.flags import value_text
from spmd_encoder.keeper.control_client import PROGRESS_S
from spmd_encoder.runtime.compute import BEAT_S
from spmd_encoder.runtime.control import KEEPER_SILENCE

FIELDS = [pytest.param(section, field, id=field.name) for section, _, field in flag_fields()]


def usage_error(argv: Sequence[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        parse_config(argv, environ or {})
    assert caught.value.exit_code == 2
    message = caught.value.message
    assert "\n" not in message
    assert message.strip()
    return message


SPECIAL = {
    "encoder_register_urls": ("http://one.example:8997",),
    "sglang_embedding_class": "a.b:C",
    "preparer_memory_bytes": 2**28,
}


def another_value(field: dataclasses.Field[Any]) -> Any:
    if field.name in SPECIAL:
        return SPECIAL[field.name]
    if field.metadata["choices"]:
        return next(c for c in field.metadata["choices"] if c != field.default)
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, tuple):
        return ("one.example", "2001:db8::1")
    if isinstance(field.default, int | float):
        return field.default + 1
    numbers = ("dp_size", "preparers", "grpc_port", "grpc_max_message_bytes", "max_queued_tokens")
    return 7 if field.name in numbers else "something-else"


def test_defaults() -> None:
    config, check = parse_config([], {})
    assert config == Config()
    assert not check
    assert config.served_name == DEFAULT_MODEL
    assert parse_config(["--check"], {}) == (Config(), True)


@pytest.mark.parametrize(("section", "field"), FIELDS)
def test_every_flag_has_an_environment_twin_and_wins_over_it(section: str, field: dataclasses.Field[Any]) -> None:
    wanted = another_value(field)
    environ = {env_name(field): value_text(wanted)}
    assert env_name(field) == ENV_PREFIX + flag_name(field)[2:].upper().replace("-", "_")

    from_env, _ = parse_config([], environ)
    assert getattr(getattr(from_env, section), field.name) == wanted
    from_flag, _ = parse_config([flag_name(field), value_text(wanted)], {})
    assert from_flag == from_env
    assert from_flag != Config()
    if field.default is not None:
        assert parse_config([flag_name(field), value_text(field.default)], environ)[0] == Config()


@pytest.mark.parametrize(("section", "field"), FIELDS)
def test_aliases_mean_the_same(section: str, field: dataclasses.Field[Any]) -> None:
    wanted = value_text(another_value(field))
    for alias in field.metadata["alias"]:
        assert parse_config([alias, wanted], {}) == parse_config([flag_name(field), wanted], {})


def test_a_flag_given_as_its_default_still_wins() -> None:
    config, _ = parse_config(["--port", "30000"], {"SPMD_ENCODER_PORT": "1234"})
    assert config.server.port == 30000


def test_no_two_flags_share_a_name() -> None:
    names = [name for _, _, field in flag_fields() for name in (flag_name(field), *field.metadata["alias"])]
    assert len(names) == len(set(names))
    assert len(Config().flat()) == len(flag_fields()) + 1  # and the faults


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--no-such-flag=3"], "--no-such-flag"),
        (["stray"], "stray"),
        (["--por", "1"], "--por"),
        (["--max-batch", "1"], "--max-batch"),
        (["--port"], "--port"),
        (["--port", "many"], "many"),
        (["--dtype", "float8"], "float8"),
        (["--port", "65536"], "--port"),
        (["--port", "-1"], "--port"),
        (["--grpc-port", "65536"], "--grpc-port"),
        (["--port", "1234", "--grpc-port", "1234"], "both 1234"),
        (["--cache-bytes", "-1"], "--cache-bytes must be at least 0, not -1"),
        (["--stall-timeout-s", "0.3"], "--stall-timeout-s must be at least 1, not 0.3: ranks report once a second"),
        (["--stall-timeout-s", "nan"], "--stall-timeout-s"),
        (["--tp-size", "0"], "--tp-size"),
        (["--dp-size", "-1"], "--dp-size"),
        (["--max-batch-items", "0"], "--max-batch-items"),
        (["--request-timeout-s", "-0.5"], "--request-timeout-s"),
        (["--request-timeout-s", "nan"], "--request-timeout-s"),
        (["--drain-deadline-s", "0"], "--drain-deadline-s"),
        (["--allow-private-media-hosts", "maybe"], "maybe"),
        (["--allow-private-media-hosts="], "--allow-private-media-hosts"),
        (["--media-url-max-file-size-mb", "-1"], "--media-url-max-file-size-mb"),
        (["--allowed-media-domains", "good.example", "https://bad.example"], "https://bad.example"),
        (["--allowed-media-domains", "*.example"], "*.example"),
        (["--allowed-hosts", "*.example"], "--allowed-hosts"),
        (["--allowed-media-domains", "bad.example:8080"], "bad.example:8080"),
        (["--allowed-media-domains", "[2001:db8::1]"], "[2001:db8::1]"),
    ],
)
def test_a_bad_flag_is_one_sentence(argv: list[str], named: str) -> None:
    assert named in usage_error(argv)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPMD_ENCODER_PORT", "eighty"),
        ("SPMD_ENCODER_PORT", ""),
        ("SPMD_ENCODER_STALL_TIMEOUT_S", "soon"),
        ("SPMD_ENCODER_DTYPE", "float8"),
        ("SPMD_ENCODER_ALLOW_PRIVATE_MEDIA_HOSTS", "maybe"),
        ("SPMD_ENCODER_ALLOW_PRIVATE_MEDIA_HOSTS", ""),
    ],
)
def test_a_bad_environment_value_names_its_variable(name: str, value: str) -> None:
    message = usage_error([], {name: value})
    assert name in message
    assert repr(value) in message


def test_a_flag_hides_a_bad_environment_value() -> None:
    assert parse_config(["--port", "1"], {"SPMD_ENCODER_PORT": "eighty"})[0].server.port == 1


def test_zero_where_it_means_something() -> None:
    assert parse_config(["--port", "0", "--grpc-port", "0"], {})[0].server.port == 0, "each finds its own"
    assert parse_config(["--cache-bytes", "0"], {})[0].limits.cache_bytes == 0
    assert parse_config(["--media-url-max-file-size-mb", "0"], {})[0].media.media_url_max_file_size_mb == 0


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], False),
        (["--allow-private-media-hosts"], True),
        (["--allow-private-media-hosts", "--port", "1"], True),
        (["--allow-private-media-hosts=yes"], True),
        (["--allow-private-media-hosts", "1"], True),
        (["--allow-private-media-hosts=False"], False),
        (["--allow-private-media-hosts", "off"], False),
    ],
)
def test_a_boolean_flag_alone_is_true_and_takes_words(argv: list[str], wanted: bool) -> None:
    assert parse_config(argv, {})[0].media.allow_private_media_hosts is wanted
    if argv:
        environ = {"SPMD_ENCODER_ALLOW_PRIVATE_MEDIA_HOSTS": str(not wanted)}
        assert parse_config(argv, environ)[0].media.allow_private_media_hosts is wanted


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--allowed-media-domains", "a.example", "b.example"], ("a.example", "b.example")),
        (["--allowed-media-domains=a.example,b.example"], ("a.example", "b.example")),
        (["--allowed-media-domains", "a.example, b.example", "--port", "1"], ("a.example", "b.example")),
        (["--allowed-media-domains", ""], ()),
        (["--allowed-media-domains"], ()),
    ],
)
def test_a_list_takes_commas_and_spaces(argv: list[str], wanted: tuple[str, ...]) -> None:
    environ = {"SPMD_ENCODER_ALLOWED_MEDIA_DOMAINS": "c.example"}
    assert parse_config(argv, environ)[0].media.allowed_media_domains == wanted


def test_the_least_stall_timeout_leaves_time_for_reports() -> None:
    lifecycle = parse_config(["--stall-timeout-s", "1"], {})[0].lifecycle
    assert lifecycle.stall_timeout_s * KEEPER_SILENCE > 2 * PROGRESS_S
    assert lifecycle.stall_timeout_s > 2 * BEAT_S


def test_faults_come_from_the_environment_only() -> None:
    assert parse_config([], {"SPMD_ENCODER_FAULTS": "kill@sha256:0"})[0].faults == "kill@sha256:0"
    usage_error(["--faults", "kill@sha256:0"])


def test_the_digest_is_stable_and_tells_configurations_apart() -> None:
    assert Config().digest() == Config().digest() == Config.from_json(Config().to_json()).digest()
    digests = {Config().digest()}
    for _, _, field in flag_fields():
        digests.add(parse_config([flag_name(field), value_text(another_value(field))], {})[0].digest())
    digests.add(dataclasses.replace(Config(), faults="x").digest())
    assert len(digests) == len(flag_fields()) + 2


def test_the_flags_table_has_a_line_per_flag() -> None:
    lines = flags_table().splitlines()[2:]
    assert len(lines) == len(flag_fields())
    for line, (_, _, field) in zip(lines, flag_fields(), strict=True):
        assert line.count("|") == 5, line
        assert f"`{flag_name(field)}`" in line
        assert f"`{env_name(field)}`" in line
        assert field.metadata["help"] in line


@pytest.mark.parametrize(
    ("tp", "dp", "world", "sizes"),
    [(1, None, 1, (1, 1)), (1, None, 5, (5, 1)), (2, None, 6, (3, 2)), (4, 1, 4, (1, 4)), (2, 2, 4, (2, 2))],
)
def test_layouts_that_fit(tp: int, dp: int | None, world: int, sizes: tuple[int, int]) -> None:
    config = Config(parallel=ParallelConfig(tp_size=tp, dp_size=dp))
    assert validate_layout(config, world) == sizes


@pytest.mark.parametrize(
    ("tp", "dp", "world", "named"),
    [(2, None, 3, ["--tp-size 2", "3"]), (4, None, 2, ["--tp-size 4"]), (2, 3, 4, ["--dp-size 3", "6", "4"])],
)
def test_layouts_that_do_not_fit(tp: int, dp: int | None, world: int, named: list[str]) -> None:
    with pytest.raises(StartupError) as caught:
        validate_layout(Config(parallel=ParallelConfig(tp_size=tp, dp_size=dp)), world)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    assert all(word in caught.value.message for word in named)


def test_cache_dir() -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/spmd_encoder")
    assert cache_dir({"XDG_CACHE_HOME": "relative"}) == cache_dir({}) == Path.home() / ".cache/spmd_encoder"


def test_to_json_is_json_with_every_flag() -> None:
    assert json.loads(Config().to_json()).keys() == {f.name for _, _, f in flag_fields()} | {"faults"}
