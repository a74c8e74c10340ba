"""`file://`: from inside one folder only, regular files only, and nothing learnt of what is outside."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from spmd_encoder.errors import EncoderError, ErrorCode
from spmd_encoder.media.fetch import MediaFetcher
from spmd_encoder.media.local_file import parse_file_url
from spmd_encoder.media_flags import MediaConfig

BODY = bytes(range(256)) * 9000  # more than one read


def no_account(num_bytes: int) -> None:
    pass


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.png").write_bytes(BODY)
    (folder / "sub/b.png").write_bytes(b"b")
    (folder / "empty").write_bytes(b"")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-too").mkdir()
    (tmp_path / "media-too/c.png").write_bytes(b"c")
    return folder


def fetcher(root: Path | str | None, max_mb: int = 64) -> MediaFetcher:
    path = None if root is None else str(root)
    return MediaFetcher(MediaConfig(allowed_local_media_path=path, media_url_max_file_size_mb=max_mb))


async def get(root: Path | str, path: Path | str) -> bytes:
    return await fetcher(root).fetch(f"file://{path}", reserve=no_account)


async def failure(
    root: Path | str | None, url: str, reserve: Callable[[int], None] = no_account, max_mb: int = 64
) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        await fetcher(root, max_mb).fetch(url, reserve=reserve)
    assert caught.value.message.isprintable()
    assert str(root) not in caught.value.message
    return caught.value


async def test_without_a_folder_files_are_refused(root: Path) -> None:
    for url in (f"file://{root}/a.png", "FILE:///etc/hostname", "file://x", "file://"):
        error = await failure(None, url)
        assert error.code is ErrorCode.FETCH_FORBIDDEN
        assert "--allowed-local-media-path" in error.message


async def test_files_inside_are_read_and_accounted_for(root: Path) -> None:
    account: list[int] = []
    assert await fetcher(root).fetch(f"file://{root}/a.png", reserve=account.append) == BODY
    assert sum(account) == len(BODY)
    assert await get(root, f"localhost{root}/sub/b.png") == b"b"
    assert await get(root, f"{root}//sub///b.png") == b"b"
    assert await get(f"{root}/", f"{root}/sub%2Fb.png") == b"b"
    assert await fetcher("/").fetch(f"File://LocalHost{root}/sub/b.png", reserve=no_account) == b"b"


@pytest.mark.parametrize("name", ["a b.png", "ü.png", "%.png", "a?b#c.png", "日本.png", "a\nb.png", "a\\b"])
async def test_names_of_all_kinds(root: Path, name: str) -> None:
    (root / name).write_bytes(b"x")
    escaped = "".join(f"%{byte:02x}" for byte in name.encode())
    assert await get(root, f"{root}/{escaped}") == b"x"


async def test_a_name_that_is_not_utf8(root: Path) -> None:
    (root / os.fsdecode(b"\xff\xfe.png")).write_bytes(b"x")
    assert await get(root, f"{root}/%ff%FE.png") == b"x"
    error = await failure(root, f"file://{root}/%ff%fd.png")
    assert error.code is ErrorCode.FETCH_FAILED


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("file://", ErrorCode.INVALID_REQUEST),
        ("file://host{root}/a.png", ErrorCode.INVALID_REQUEST),
        ("file://localhost.{root}/a.png", ErrorCode.INVALID_REQUEST),
        ("file://127.0.0.1{root}/a.png", ErrorCode.INVALID_REQUEST),
        ("file://user@{root}/a.png", ErrorCode.INVALID_REQUEST),
        ("file://a.png", ErrorCode.INVALID_REQUEST),
        ("file://{root}/a.png?x", ErrorCode.INVALID_REQUEST),
        ("file://{root}/a.png#x", ErrorCode.INVALID_REQUEST),
        ("file://{root}/a%2.png", ErrorCode.INVALID_REQUEST),
        ("file://{root}/a.png%00", ErrorCode.INVALID_REQUEST),
        ("file://{root}/a.png\0", ErrorCode.INVALID_REQUEST),
        ("file://{root}/a\n.png", ErrorCode.INVALID_REQUEST),
        ("file://{root}/\ud800", ErrorCode.INVALID_REQUEST),
        ("file:///etc/hostname", ErrorCode.FETCH_FORBIDDEN),
        ("file:///", ErrorCode.FETCH_FORBIDDEN),
        ("file:///no/such/file", ErrorCode.FETCH_FORBIDDEN),
        ("file:///proc/self/environ", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/../secret", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/%2e%2e/secret", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/%2E./secret", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/sub/..%2f../secret", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/sub/../a.png", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/./a.png", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/..", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}-too/c.png", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/sub", ErrorCode.FETCH_FORBIDDEN),
        ("file://{root}/%252e%252e/secret", ErrorCode.FETCH_FAILED),
        ("file://{root}/none.png", ErrorCode.FETCH_FAILED),
        ("file://{root}/a.png/b", ErrorCode.FETCH_FAILED),
        ("file://{root}/none/none/none", ErrorCode.FETCH_FAILED),
        ("file://{root}/empty", ErrorCode.FETCH_FAILED),
    ],
)
async def test_what_is_refused(root: Path, url: str, code: ErrorCode) -> None:
    error = await failure(root, url.format(root=root))
    assert error.code is code, error.message


async def test_a_name_that_is_too_long(root: Path) -> None:
    assert (await failure(root, f"file://{root}/" + "x" * 5000)).code is ErrorCode.FETCH_FAILED
    assert (await failure(root, f"file://{root}" + "/x" * 5000)).code is ErrorCode.FETCH_FAILED


async def test_whether_an_outer_file_exists_is_not_told(root: Path) -> None:
    (root / "there").symlink_to(root.parent / "secret")
    (root / "not-there").symlink_to(root.parent / "no-such-file")
    urls = [f"file://{root.parent}/{name}" for name in ("secret", "none", "secret/x", "media-too")]
    urls += [f"file://{root}/{name}" for name in ("there", "not-there", "there/x")]
    messages = {(error := await failure(root, url)).message: error.code for url in urls}
    assert list(messages.values()) == [ErrorCode.FETCH_FORBIDDEN]


async def test_links_may_lead_inside_but_not_outside(root: Path) -> None:
    (root / "inner").symlink_to(root / "sub/b.png")
    (root / "inner-folder").symlink_to("sub")
    assert await get(root, f"{root}/inner") == b"b"
    assert await get(root, f"{root}/inner-folder/b.png") == b"b"
    (root / "up").symlink_to("..")
    (root / "chain").symlink_to("up/secret")
    (root / "loop").symlink_to("loop")
    for name in ("up/secret", "up/media-too/c.png", "chain", "loop"):
        assert (await failure(root, f"file://{root}/{name}")).code is ErrorCode.FETCH_FORBIDDEN


async def test_the_folder_itself_may_be_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert await get(link, f"{link}/sub/b.png") == b"b"
    assert await get(link, f"{root}/sub/b.png") == b"b"
    assert (await failure(link, f"file://{root.parent}/secret")).code is ErrorCode.FETCH_FORBIDDEN


async def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert (await failure(missing, f"file://{missing}/a.png")).code is ErrorCode.FETCH_FAILED
    assert (await failure(missing, f"file://{tmp_path}")).code is ErrorCode.FETCH_FORBIDDEN


@pytest.fixture
def special(root: Path) -> Iterator[Path]:
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        at = os.open(root, os.O_RDONLY)
        try:
            bound.bind(f"/proc/self/fd/{at}/socket")  # a path of its own may be too long for a socket
        finally:
            os.close(at)
        yield root


@pytest.mark.parametrize("name", ["fifo", "socket"])
async def test_only_regular_files(special: Path, name: str) -> None:
    error = await failure(special, f"file://{special}/{name}")
    assert error.code is ErrorCode.FETCH_FORBIDDEN
    assert "regular" in error.message


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/tty", "/dev/stdin", "/dev/fd/0"])
async def test_devices(path: str) -> None:
    assert (await failure("/dev", f"file://{path}")).code is ErrorCode.FETCH_FORBIDDEN


async def test_a_file_whose_size_is_not_what_it_says() -> None:
    assert (await failure("/proc", "file:///proc/version")).code is ErrorCode.FETCH_FAILED


async def test_the_size_limit(root: Path) -> None:
    with (root / "large").open("wb") as file:
        file.truncate(2**20)
    assert len(await fetcher(root, 1).fetch(f"file://{root}/large", reserve=no_account)) == 2**20
    with (root / "large").open("wb") as file:
        file.truncate(2**40)  # sparse
    account: list[int] = []
    error = await failure(root, f"file://{root}/large", account.append, max_mb=1)
    assert error.code is ErrorCode.TOO_LARGE
    assert "--media-url-max-file-size-mb" in error.message
    assert not account


async def test_what_reserve_raises_is_passed_on(root: Path) -> None:
    def reserve(num_bytes: int) -> None:
        raise EncoderError(ErrorCode.OVERLOADED, f"no room for {num_bytes}")

    error = await failure(root, f"file://{root}/a.png", reserve)
    assert (error.code, error.message) == (ErrorCode.OVERLOADED, f"no room for {len(BODY)}")


@pytest.mark.parametrize("new", [BODY[:-1], BODY + b"x", b"", None], ids=["shorter", "longer", "empty", "gone"])
async def test_a_file_that_changes_between_its_size_and_its_content(root: Path, new: bytes | None) -> None:
    def reserve(num_bytes: int) -> None:
        (root / "a.png").unlink()
        if new is not None:
            (root / "a.png").write_bytes(new)

    assert (await failure(root, f"file://{root}/a.png", reserve)).code is ErrorCode.FETCH_FAILED


async def test_a_folder_that_becomes_a_link_between_check_and_use(root: Path) -> None:
    def reserve(num_bytes: int) -> None:
        (root / "sub").rename(root / "moved")
        (root / "sub").symlink_to(root.parent)

    (root / "sub/secret").write_bytes(b"public")
    assert (await failure(root, f"file://{root}/sub/secret", reserve)).code is ErrorCode.FETCH_FORBIDDEN


async def test_cancelled_and_closed_leave_no_file_open(root: Path) -> None:
    def open_files() -> set[str]:
        names = set()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # closed by now
                names.add(str(link.readlink()))
        return names

    media = fetcher(root)
    for _ in range(20):
        job = asyncio.create_task(media.fetch(f"file://{root}/a.png", reserve=no_account))
        await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
    assert await media.fetch(f"file://{root}/a.png", reserve=no_account) == BODY
    await media.close()
    with pytest.raises(EncoderError) as caught:
        await media.fetch(f"file://{root}/a.png", reserve=no_account)
    assert caught.value.code is ErrorCode.DRAINING
    while any(str(root) in name for name in open_files()):  # abandoned reads end by themselves
        await asyncio.sleep(0.01)


def test_the_path_of_a_url() -> None:
    assert parse_file_url("file:///a%20b/%C3%BC") == "/a b/ü"
    assert parse_file_url("FILE://LOCALHOST/a b") == "/a b"
