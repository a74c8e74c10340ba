"""What a keeper reads of its worker's tower when the worker is gone."""

from __future__ import annotations

import errno
import os
import signal
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_encoder.wire.tower_page import TowerPage


def test_what_was_written_last_is_read_and_nothing_before_anything_was(tmp_path: Path) -> None:
    keeper = TowerPage.create(tmp_path / "tower", 8)
    worker = TowerPage.open(tmp_path / "tower")
    assert keeper.read() == ()
    for job_ids in ((1, 2, 3), (), (2**63,), tuple(range(8)), (7,)):
        worker.write(job_ids)
        assert keeper.read() == job_ids
    worker.close()
    worker.close()
    assert keeper.read() == (7,)
    keeper.write(())
    assert TowerPage.open(tmp_path / "tower").read() == ()


def test_it_outlives_its_writers_sigkill(tmp_path: Path) -> None:
    keeper = TowerPage.create(tmp_path / "tower", 8)
    child = os.fork()
    if child == 0:
        TowerPage.open(tmp_path / "tower").write([41, 42])
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert keeper.read() == (41, 42)


@given(first=st.lists(st.integers(0, 2**40), max_size=8), second=st.lists(st.integers(0, 2**40), max_size=8))
def test_a_writer_that_is_killed_on_the_way_leaves_what_was_before(
    tmp_path_factory: pytest.TempPathFactory, first: list[int], second: list[int]
) -> None:
    path = tmp_path_factory.mktemp("page") / "tower"
    page = TowerPage.create(path, 8)
    page.write(first)

    class KilledError(Exception):
        pass

    class Ids(list[int]):
        """Ends its reader before the last id."""

        def __getitem__(self, key: object) -> Ids:  # type: ignore[override]
            return self

        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from super().__iter__()
            raise KilledError

    with pytest.raises(KilledError):
        page.write(Ids(second))
    assert page.read() == tuple(first)
    page.write(second)
    assert page.read() == tuple(second)
    page.close()


def test_a_batch_that_is_larger_than_it_may_be_leaves_the_other_list_alone(tmp_path: Path) -> None:
    page = TowerPage.create(tmp_path / "tower", 3)
    page.write((1, 2))
    page.write(range(10))
    assert page.read() == (0, 1, 2)
    page.write((5,))
    assert page.read() == (5,)


def test_the_next_writer_finds_an_empty_one_also_where_its_file_has_gone(tmp_path: Path) -> None:
    path = tmp_path / "tower"
    keeper = TowerPage.create(path, 3)
    for removes in (False, True, False):
        before = TowerPage.open(path)
        before.write((1, 2))
        if removes:
            path.unlink()
        after = keeper.for_next_writer()
        assert (after is keeper) is not removes
        keeper = after
        writer = TowerPage.open(path)
        assert keeper.read() == writer.read() == ()
        writer.write(range(10))
        assert keeper.read() == (0, 1, 2), "as many as before"
        if removes:
            before.write((3,))
            assert keeper.read() == (0, 1, 2)
    path.unlink()
    tmp_path.rename(tmp_path.with_suffix(".gone"))
    with pytest.raises(OSError):
        keeper.for_next_writer()
    assert keeper.read() == (), "it can be used all the same"


def test_it_is_for_nobody_else_has_no_holes_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tower"
    TowerPage.create(path, 1000).write((1,))
    before = path.stat()
    assert stat.S_IMODE(before.st_mode) == 0o600
    assert before.st_blocks * 512 >= before.st_size > 16_000
    assert TowerPage.create(path, 10**12).read() == ()
    assert path.stat().st_size < 2**19


def test_a_file_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        TowerPage.create(tmp_path / "nowhere" / "tower", 8)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(OSError):
        TowerPage.open(tmp_path / "tower")
