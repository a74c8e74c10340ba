"""A configuration survives every way in which it travels."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from spmd_encoder.config import LEAST_PREPARER_BYTES, Config, env_name, flag_fields, flag_name, parse_config
from spmd_encoder.flags import value_text
from tests.harness.examples import examples

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)


def values(cls: type, field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    is_whole = typing.get_type_hints(cls)[field.name] in (int, int | None)
    if field.metadata["choices"]:
        return st.sampled_from(field.metadata["choices"])
    if field.name == "sglang_embedding_class":
        return st.sampled_from(["a.b:C", "sglang.srt.disaggregation.encode_receiver:EmbeddingData"])
    if field.name == "encoder_register_urls":
        return st.lists(st.sampled_from(["http://a:8997", "https://b.c"]), max_size=2).map(tuple)
    if field.name in ("port", "grpc_port"):  # never the same
        return st.integers(0, 32767) if field.name == "port" else st.sampled_from([0, 32768, 65535])
    if isinstance(field.default, bool):
        return st.booleans()
    if isinstance(field.default, tuple):
        return st.lists(st.from_regex(r"[a-z0-9][a-z0-9-]{0,9}(\.[a-z]{1,5}){0,2}", fullmatch=True), max_size=3).map(
            tuple
        )
    if is_whole:
        return st.integers(LEAST_PREPARER_BYTES if field.name == "preparer_memory_bytes" else 1, 2**40)
    if isinstance(field.default, float):
        return st.floats(min_value=(field.metadata["least"] or (1e-6, ""))[0], max_value=1e9, allow_nan=False)
    return words


chosen = st.fixed_dictionaries({}, optional={f.name: values(cls, f) for _, cls, f in flag_fields()})
FIELDS = {field.name: field for _, _, field in flag_fields()}


@examples(50, suppress_health_check=[HealthCheck.too_slow])
@given(chosen, st.sets(st.sampled_from(sorted(FIELDS))))
def test_flags_environment_and_json_agree(values: dict[str, Any], by_flag: set[str]) -> None:
    argv = [f"{flag_name(FIELDS[name])}={value_text(value)}" for name, value in values.items() if name in by_flag]
    environ = {env_name(FIELDS[name]): value_text(value) for name, value in values.items() if name not in by_flag}
    config, _ = parse_config(argv, environ)
    flat = config.flat()
    assert {name: flat[name] for name in values} == values
    assert {n: v for n, v in flat.items() if n not in values} == {
        n: v for n, v in Config().flat().items() if n not in values
    }
    assert Config.from_json(config.to_json()) == config
    assert Config.from_json(config.to_json()).digest() == config.digest()
    assert (config.digest() == Config().digest()) == (config == Config())
