"""`python -m spmd_encoder.client encode|embed|lookup|wait`: pictures, sounds, films to files, without any code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from spmd_encoder.client.aio import AsyncClient
from spmd_encoder.client.base import DEFAULT_URL
from spmd_encoder.client.destinations import Destination, ToFiles, ToReceiver
from spmd_encoder.client.errors import EncoderClientError, ItemError
from spmd_encoder.client.files import WriteError
from spmd_encoder.client.inputs import InputError, named_items, printable
from spmd_encoder.client.media import SUFFIXES, Modality, Video
from spmd_encoder.client.outputs import NumpyFile, Output, OutputError, Receipts, ShardFolder, SingleFile
from spmd_encoder.client.sources import DIGEST, named_modality

_USAGE = 2
_OUT_HELP = ".safetensors (a tensor per path), or as below"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all is done, 1 an item failed or the server did, 2 usage, 130 interrupted."""
    args = _parser().parse_args(argv)
    try:
        return asyncio.run(_COMMANDS[args.command](args))
    except (InputError, OutputError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    except (EncoderClientError, WriteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spmd_encoder.client", description="Encode pictures, sounds and films on a server."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    common.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="sent with every request")
    common.add_argument("--timeout-s", type=float, default=300.0, help="for one request with its retries, or the wait")
    wait = commands.add_parser("wait", parents=[common], help="return when the server is ready")
    wait.set_defaults(output=None, jobs=1, model=None)
    media = argparse.ArgumentParser(add_help=False)
    media.add_argument("images", nargs="+", help="files, patterns, URLs; folders with --recursive")
    media.add_argument("--recursive", action="store_true", help="take from folders, at any depth, what the model takes")
    media.add_argument("--fps", type=float, help="frames per second that films are sampled at; default: the model's")
    media.add_argument("--max-frames", type=int, help="most frames of a film; default: the model's")
    media.add_argument("--jobs", type=int, default=8, help="requests at a time (default: %(default)s)")
    media.add_argument("--model", help="refuse a server that serves another")
    encode = commands.add_parser(
        "encode",
        parents=[common, media],
        help="write embeddings by path",
        description="--out may be a folder too: shards and index.jsonl; the same command goes on where one was cut off",
    )
    where = encode.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help=_OUT_HELP)
    where.add_argument(
        "--to",
        type=_place,
        metavar="files|tcp://HOST:PORT",
        help="files in the server's --embedding-dir, or a receiver's socket; a JSON line per item says where it is",
    )
    encode.add_argument("--output", choices=("tokens", "pooled"), help="default: the model's")
    encode.add_argument("--items-per-file", type=int, default=1000, help="in a folder (default: %(default)s)")
    embed = commands.add_parser(
        "embed",
        parents=[common, media],
        help="write pooled vectors",
        description="--out may be .npy too: float32 [pictures, dim] in order (NaN where one failed), names in .npy.txt",
    )
    embed.add_argument("--out", type=Path, required=True, help=_OUT_HELP)
    embed.set_defaults(output="pooled", items_per_file=1000, to=None)
    lookup = commands.add_parser(
        "lookup",
        parents=[common, media],
        help="tell which results the server holds",
        description="a JSON line per item, or per digest (sha256:HEX) of one; only digests are sent",
    )
    lookup.add_argument("--output", choices=("tokens", "pooled"), help="default: the model's")
    return parser


async def _wait(args: argparse.Namespace) -> int:
    async with _client(args) as client:
        await client.wait_ready(args.timeout_s)
    return 0


async def _lookup(args: argparse.Namespace) -> int:
    async with _client(args) as client:
        taken = await _taken(client, args)
        named = [[name] if DIGEST.fullmatch(name) else named_items([name], taken) for name in args.images]
        items = [_item(name, args) for names in named for name in names]
        found = await client.lookup(items, output=args.output)
    for held in found:
        sys.stdout.buffer.write(msgspec.json.encode({**asdict(held), "name": printable(held.name)}) + b"\n")
    print(f"{sum(held.held for held in found)} of {len(found)} results are held", file=sys.stderr)
    return 0


async def _encode(args: argparse.Namespace) -> int:
    async with _client(args) as client:
        names = named_items(args.images, await _taken(client, args))
        output = _output(args, (await client.models())[0])
        todo = [name for name in names if not output.is_done(name)]
        if len(todo) < len(names):
            print(f"{len(names) - len(todo)} of {len(names)} items are done already", file=sys.stderr)
        errors = await _run(client, args, todo, output)
    for error in errors:
        print(f"failed: {printable(error.name)}: {error.message} ({error.code})", file=sys.stderr)
    print(f"{len(todo) - len(errors)} items encoded, {len(errors)} failed: {args.to or args.out}", file=sys.stderr)
    return 1 if errors else 0


async def _run(client: AsyncClient, args: argparse.Namespace, names: list[str], output: Output) -> list[ItemError]:
    """The failures. What came before an error or an interrupt is kept where the output can go on."""
    errors = []
    try:
        items, to = [_item(name, args) for name in names], _destination(args.to)
        async with contextlib.aclosing(client.encode_iter(items, output=args.output, destination=to)) as results:
            # tqdm says nothing where stderr is no terminal.
            with tqdm(total=len(names), unit="item", disable=None) as progress:
                async for result in results:
                    output.add(result)
                    if result.error is not None:
                        errors.append(result.error)
                    progress.update()
    except BaseException:
        if isinstance(output, ShardFolder):
            output.close()
        raise
    output.close()
    return errors


async def _taken(client: AsyncClient, args: argparse.Namespace) -> list[Modality] | None:
    """What the served model takes, where folders are to be looked into."""
    if not args.recursive:
        return None
    served = (await client.models())[0].get("modalities", ["image"])
    return [modality for modality in SUFFIXES if modality in served]


def _item(name: str, args: argparse.Namespace) -> str | Video:
    return Video(name, args.fps, args.max_frames) if named_modality(name) == "video" else name


def _output(args: argparse.Namespace, served: dict[str, Any]) -> Output:
    if args.to is not None:
        return Receipts(sys.stdout)
    job: dict[str, Any] = {"model": served.get("id"), "revision": served.get("revision"), "output": args.output}
    out: Path = args.out
    if out.suffix == ".safetensors":
        return SingleFile(out, job)
    if out.suffix == ".npy":
        if args.command != "embed":
            raise OutputError("only `embed` writes .npy; give --out a .safetensors file or a folder")
        return NumpyFile(out)
    if out.suffix and not out.is_dir():
        raise OutputError(f"--out {out}: the suffix is not known; give .safetensors, .npy (embed) or a folder")
    return ShardFolder(out, job, args.items_per_file)


def _place(text: str) -> str:
    if text != "files" and not text.startswith("tcp://"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither `files` nor a receiver's tcp://HOST:PORT")
    return text


def _destination(to: str | None) -> Destination | None:
    if to is None:
        return None
    return ToFiles() if to == "files" else ToReceiver(to)


def _client(args: argparse.Namespace) -> AsyncClient:
    headers = {}
    for header in args.header:
        name, colon, value = header.partition(":")
        if not colon:
            raise InputError("--header takes NAME:VALUE")
        headers[name.strip()] = value.strip()
    return AsyncClient(args.url, timeout_s=args.timeout_s, concurrency=args.jobs, model=args.model, headers=headers)


_COMMANDS = {"wait": _wait, "lookup": _lookup, "encode": _encode, "embed": _encode}


if __name__ == "__main__":
    sys.exit(main())
