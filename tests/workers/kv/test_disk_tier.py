"""What was kept comes back or is noticed to be wrong; the quota holds; a bad disk is survived."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pipeline.prefix_hash import prefix_hashes, salt_of
from tests.workers.kv.disk_parts import FILE_BYTES, FINGERPRINT, Died, Disk, block, chain
from workers.kv.api import BlockName
from workers.kv.rest import FIRST_REST_S, LONGEST_REST_S
from workers.kv.store import BlockStore

NUMBERS = st.integers(1, 12)
QUOTA = 6


class DiskMachine(RuleBasedStateMachine):
    """Saves and loads on a disk that fails and is tampered with, by a worker that dies at times.

    Whatever happens: what is loaded is right, files never take more than the quota, and what the
    tier says it has is what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.disk = self.start()

    def teardown(self) -> None:
        self.disk.tier.close()
        shutil.rmtree(self.root)

    def start(self) -> Disk:
        disk = Disk(self.root, QUOTA)
        assert disk.tier.open()
        return disk

    @rule(number=NUMBERS)
    def save(self, number: int) -> None:
        one = block(number, number // 2)
        try:
            if self.disk.save(one):
                assert self.disk.tier.has(one.block_hash)
        except Died:
            self.restart()

    @rule(number=NUMBERS, count=st.integers(1, 3))
    def load(self, number: int, count: int) -> None:
        wanted = [block(n, n // 2) for n in range(number, number + count)]
        expected = self.disk.tier.num_leading([one.block_hash for one in wanted])
        assert self.disk.load(*wanted) <= expected

    @rule(number=NUMBERS, place=st.integers(0, 2 * 4096 - 1))
    def flip(self, number: int, place: int) -> None:
        """A bit, in a file: of no consequence in the empty part of the header."""
        path = self.disk.path(block(number, number // 2))
        if path.exists():
            data = bytearray(path.read_bytes())
            data[place % len(data)] ^= 1
            path.write_bytes(data)

    @rule(number=NUMBERS, size=st.integers(0, 2 * 4096))
    def tear(self, number: int, size: int) -> None:
        path = self.disk.path(block(number, number // 2))
        if path.exists():
            path.write_bytes(path.read_bytes()[:size])

    @rule(number=NUMBERS)
    def take_away(self, number: int) -> None:
        self.disk.path(block(number, number // 2)).unlink(missing_ok=True)

    @rule(
        writes=st.sampled_from([0, errno.ENOSPC, errno.EIO]),
        reads=st.sampled_from([0, 0, errno.EIO]),
        deletes=st.sampled_from([0, 0, errno.EROFS]),
        dies=st.sampled_from(["", "", "open", "write", "rename"]),
    )
    def break_disk(self, writes: int, reads: int, deletes: int, dies: str) -> None:
        store = self.disk.store
        store.fails, store.reads_fail, store.deletes_fail = writes, reads, deletes
        store.dies = dies

    @rule(seconds=st.sampled_from([1.0, FIRST_REST_S, LONGEST_REST_S]))
    def wait(self, seconds: float) -> None:
        self.disk.clock += seconds

    @rule()
    def restart(self) -> None:
        """With a disk that is well again; every block that is whole is there."""
        self.disk.tier.close()
        self.disk = self.start()

    @invariant()
    def holds(self) -> None:
        tier = self.disk.tier
        tier.check_invariants()
        assert self.disk.bytes_there() <= tier.used_bytes <= QUOTA * FILE_BYTES
        assert self.disk.heard.disk.keys() == {
            one for n in range(16) if tier.has(one := block(n).block_hash)
        }


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    made = Disk(tmp_path / "worker-1")
    assert made.tier.open()
    return made


def test_nothing_is_there_before_it_is_open(tmp_path: Path) -> None:
    """Neither found nor kept."""
    disk = Disk(tmp_path / "worker-1")
    assert not disk.save(block(1))
    assert disk.load(block(1)) == 0
    assert disk.count("dropped") == 1


def test_the_next_worker_of_the_name_has_the_blocks(disk: Disk) -> None:
    """It reads names alone, says what it has, and can load it."""
    for one in chain(1, 5):
        assert disk.save(one)
    disk.tier.close()
    later = Disk(disk.root)
    assert later.tier.open()
    assert later.heard.disk == disk.heard.disk
    assert later.heard.said("kv_disk_read_back")[0]["num_blocks"] == 5
    assert later.load(*chain(1, 5)) == 5
    assert later.count("promoted") == 5


def test_two_processes_never_share_a_directory(disk: Disk) -> None:
    """The second does without until the first is gone, and says so once."""
    disk.save(block(1))
    second = Disk(disk.root)
    assert not second.tier.open()
    assert not second.tier.open()
    assert not second.save(block(2))
    assert len(second.heard.said("kv_disk_rested")) == 1
    disk.tier.close()
    assert second.tier.open()
    assert second.tier.has(block(1).block_hash)


def test_blocks_of_another_layout_are_deleted(disk: Disk) -> None:
    """Their room is ours, and what else lies there is not."""
    old = BlockStore(disk.root / ("f" * 16), "f" * 16, 100)
    old.scan()
    old.write(block(7), memoryview(bytes(100)), 0)
    (disk.root / "notes").mkdir()
    disk.tier.close()
    later = Disk(disk.root)
    assert later.tier.open()
    assert later.count("dropped") == 1
    assert sorted(path.name for path in disk.root.iterdir()) == [FINGERPRINT, "lock", "notes"]


def test_a_block_that_is_wrong_is_never_used(disk: Disk) -> None:
    """A flipped bit: counted, deleted, and those before it are still right."""
    blocks = chain(1, 4)
    for one in blocks:
        disk.save(one)
    path = disk.path(blocks[2])
    data = bytearray(path.read_bytes())
    data[5000] ^= 4
    path.write_bytes(data)
    assert disk.load(*blocks) == 2
    assert disk.count("corrupt") == 1
    assert not path.exists()
    assert not disk.tier.has(blocks[2].block_hash)
    assert disk.save(blocks[2])
    assert disk.load(*blocks) == 4


def test_the_quota_holds_and_leaves_go_first(tmp_path: Path) -> None:
    """A full tier evicts the end of what was used least, and keeps beginnings."""
    disk = Disk(tmp_path / "w", quota_blocks=8)
    assert disk.tier.open()
    for one in (*chain(1, 4), *chain(11, 4)):
        assert disk.save(one)
    assert disk.load(*chain(1, 4)) == 4
    for one in chain(21, 3):
        assert disk.save(one)
        assert disk.bytes_there() <= 8 * FILE_BYTES
    assert disk.count("evicted") == 3
    assert disk.load(*chain(1, 4)) == 4
    assert disk.tier.num_leading([one.block_hash for one in chain(11, 4)]) == 1


def test_a_smaller_quota_is_reached_at_the_start(disk: Disk) -> None:
    """The worker came back with less."""
    for one in chain(1, 50):
        disk.save(one)
    disk.tier.close()
    later = Disk(disk.root, quota_blocks=20)
    assert later.tier.open()
    assert later.tier.num_blocks == 20
    assert later.load(*chain(1, 20)) == 20


def test_a_full_disk_is_survived(disk: Disk) -> None:
    """Nothing is left of what did not fit, nothing is written for a while, what is there can be
    read, one line is logged; then it works again."""
    disk.save(block(1))
    disk.store.fails = errno.ENOSPC
    assert not disk.save(block(2))
    assert not disk.save(block(3))
    assert (disk.count("failed"), disk.count("dropped")) == (1, 1)
    assert disk.bytes_there() == FILE_BYTES
    assert disk.load(block(1)) == 1
    disk.clock += FIRST_REST_S
    assert not disk.save(block(2))
    assert len(disk.heard.said("kv_disk_rested")) == 1
    disk.store.fails = 0
    assert not disk.save(block(2))
    disk.clock += 2 * FIRST_REST_S
    assert disk.save(block(2))
    assert len(disk.heard.said("kv_disk_recovered")) == 1


def test_a_disk_that_can_not_be_read_rests(disk: Disk) -> None:
    """Nobody is sent to it meanwhile."""
    for one in chain(1, 3):
        disk.save(one)
    disk.store.reads_fail = errno.EIO
    assert disk.load(*chain(1, 3)) == 0
    assert disk.tier.num_leading([block(2).block_hash]) == 0
    disk.store.reads_fail = 0
    assert disk.load(block(2, 1)) == 0
    disk.clock += FIRST_REST_S
    assert disk.load(block(2, 1)) == 1


def test_a_slow_disk_rests(disk: Disk) -> None:
    """A block that took seconds is kept, but no more is written for a while."""
    write = disk.store.write

    def slowly(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        disk.clock += 5.0

    disk.store.write = slowly  # type: ignore[method-assign]
    assert disk.save(block(1))
    assert not disk.save(block(2))
    assert "5.0 s" in disk.heard.said("kv_disk_rested")[0]["reason"]


def test_what_the_disk_does_not_delete_still_counts(tmp_path: Path) -> None:
    """Its bytes are there; it is tried again."""
    disk = Disk(tmp_path / "w", quota_blocks=2)
    assert disk.tier.open()
    disk.save(block(1))
    disk.save(block(2))
    disk.store.deletes_fail = 1
    assert not disk.save(block(3))
    assert disk.bytes_there() == 2 * FILE_BYTES
    disk.store.deletes_fail = 0
    disk.clock += FIRST_REST_S
    assert disk.save(block(3))
    assert disk.bytes_there() == 2 * FILE_BYTES


def test_a_directory_that_can_not_be_had_is_done_without(tmp_path: Path) -> None:
    """Until it can."""
    (tmp_path / "disk").write_text("a file")
    disk = Disk(tmp_path / "disk" / "w")
    assert not disk.tier.open()
    assert not disk.tier.open()
    assert len(disk.heard.said("kv_disk_rested")) == 1
    (tmp_path / "disk").unlink()
    assert disk.tier.open()
    assert disk.save(block(1))


def test_revisions_and_tenants_never_share(disk: Disk) -> None:
    """The same prompt of another tenant, salt or revision is another block: never found."""
    prompt = tuple(range(64))
    facts = ("rev-1", FINGERPRINT, "alice", "")
    ours = [
        BlockName(block_hash=one, parent=one) for one in prefix_hashes(prompt, 16, salt_of(*facts))
    ]
    for one in ours:
        assert disk.save(one)
    assert disk.tier.num_leading([one.block_hash for one in ours]) == 4
    for other in (
        ("rev-2", FINGERPRINT, "alice", ""),
        ("rev-1", FINGERPRINT, "bob", ""),
        ("rev-1", FINGERPRINT, "alice", "salt"),
        ("rev-1", "f" * 16, "alice", ""),
    ):
        assert disk.tier.num_leading(prefix_hashes(prompt, 16, salt_of(*other))) == 0
    assert disk.count("promoted") == 0
