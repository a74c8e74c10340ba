"""Command lines and environments that were made for SGLang."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from spmd_encoder.config import flag_fields, flag_name, parse_config
from spmd_encoder.errors import StartupError
from spmd_encoder.sglang_flags import FLAGS, VARIABLES, Verdict, class_path, take_foreign

OWN = {name for _, _, field in flag_fields() for name in (flag_name(field), *field.metadata["alias"])}
LAUNCH = [
    *("--model-path", "/models/Qwen2.5-VL-7B-Instruct", "--encoder-only", "--tp-size", "2", "--port", "30000"),
    *("--nnodes", "1", "--node-rank", "0", "--dist-init-addr", "10.0.0.1:5000", "--base-gpu-id", "4"),
    *("--enable-metrics", "--trust-remote-code", "--encoder-transfer-backend", "zmq_to_tokenizer"),
    *("--encoder-register-urls", "http://lm:8997", "--mem-fraction-static", "0.8"),
]


def test_a_launch_line_works() -> None:
    rest, notes = take_foreign(LAUNCH, {})
    config, _ = parse_config(rest, {})
    assert config.parallel.tp_size == 2
    assert config.sglang.encoder_transfer_backend == "zmq_to_tokenizer"
    assert config.sglang.encoder_register_urls == ("http://lm:8997",)
    assert {note.split()[0] for note in notes} == {
        *("--encoder-only", "--nnodes", "--node-rank", "--dist-init-addr", "--base-gpu-id", "--enable-metrics"),
        *("--trust-remote-code", "--mem-fraction-static"),
    }


@pytest.mark.parametrize("entry", FLAGS, ids=lambda entry: entry.name)
def test_every_flag_of_the_table(entry) -> None:  # type: ignore[no-untyped-def]
    argv = [entry.name] + ([] if entry.takes == 0 else ["value"])
    match entry.verdict:
        case Verdict.SAME:
            assert entry.name in OWN
            assert take_foreign(argv, {}) == (argv, [])
        case Verdict.ACCEPTED:
            assert entry.name not in OWN
            rest, (note,) = take_foreign(["--port", "1", *argv, "--host", "x"], {})
            assert rest == ["--port", "1", "--host", "x"]
            assert note.startswith(entry.name) and entry.text in note
        case Verdict.REFUSED:
            with pytest.raises(StartupError) as caught:
                take_foreign(argv, {})
            assert caught.value.exit_code == 2
            assert entry.name in caught.value.message and entry.text in caught.value.message
    for value in entry.harmless:
        assert take_foreign([f"{entry.name}={value}"], {}) == ([], [])


def test_mooncakes_flags_are_taken() -> None:
    argv = ["--encoder-transfer-backend", "mooncake", "--disaggregation-ib-device", "mlx5_0,mlx5_1"]
    assert take_foreign(argv, {}) == (argv, [])
    config, _ = parse_config(argv, {"MOONCAKE_PROTOCOL": "tcp"})
    settings = config.sglang
    assert (settings.encoder_transfer_backend, settings.mooncake_protocol) == ("mooncake", "tcp")
    assert settings.mooncake_ib_device == "mlx5_0,mlx5_1"


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("SGLANG_ENCODER_REQ_TIMEOUT", "77", "request_timeout_s"),
        ("SGLANG_ENCODER_SEND_TIMEOUT", "78.5", "send_timeout_s"),
        ("SGLANG_ENCODER_MAX_BATCH_SIZE", "3", "max_batch_items"),
        ("SGLANG_ENCODER_MAX_PENDING_REQUESTS", "64", "max_queued_items"),
    ],
)
def test_variables_are_a_fall_back(variable: str, value: str, field: str) -> None:
    assert any(entry.name == variable and entry.verdict is Verdict.SAME for entry in VARIABLES)

    def taken(argv: list[str], environ: dict[str, str]) -> float:
        return float(parse_config(argv, environ)[0].flat()[field])

    own = f"SPMD_ENCODER_{field.upper()}"
    assert taken([], {variable: value}) == float(value)
    assert taken([], {variable: value, own: "5"}) == 5
    assert taken([f"--{field.replace('_', '-')}", "6"], {variable: value, own: "5"}) == 6
    with pytest.raises(StartupError, match=variable):
        parse_config([], {variable: "much"})


def test_other_variables_are_spoken_of_where_they_are_set() -> None:
    assert take_foreign([], {"SGLANG_ENCODER_PREPROC_WORKERS": "8", "HOME": "/"})[1] == [
        "SGLANG_ENCODER_PREPROC_WORKERS of SGLang does nothing: see --preparers, which counts processes"
    ]


@pytest.mark.parametrize("url", ["lm:8997", "ftp://lm:8997", "http://", "http://a b", "http://lm:8997/x"])
def test_bootstraps_that_are_none(url: str) -> None:
    with pytest.raises(StartupError, match="encoder-register-urls"):
        parse_config([f"--encoder-register-urls={url}"], {})


@pytest.mark.parametrize(
    "text", ["", "EmbeddingData", "os:", "a.b:c.d", "a.b:c\nos\nsystem", "a..b:C", ":C", "a b.c:D", "ä.b:C"]
)
def test_class_paths_that_are_none(text: str) -> None:
    with pytest.raises(StartupError, match=r"package\.module:Class"):
        class_path(text)


def test_the_program_takes_and_refuses() -> None:
    run = [sys.executable, "-m", "spmd_encoder", "--check"]
    done = subprocess.run([*run, "--encoder-only", "--nnodes", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tp_size"] == 1
    assert done.stderr.splitlines() == [
        "--encoder-only of SGLang is accepted and does nothing: this server is nothing else",
        "--nnodes of SGLang is accepted and does nothing: torchrun's own --nnodes says this",
    ]
    done = subprocess.run([*run, "--language-only"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "spmd_encoder rank 0: --language-only of SGLang is not taken: belongs to the language server, not to its "
        "encoder\n"
    )
