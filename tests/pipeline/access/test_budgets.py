"""The shared file: exact over processes, true after deaths, boots and a full table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.access import budgets as module
from pipeline.access.budgets import FILE, open_budgets
from pipeline.access.charge import Charge
from pipeline.access.errors import RateLimited
from pipeline.access.permit import MeteredPermit
from schemas.errors import ConfigError, NoCapacity
from tests.pipeline.access.conftest import PATIENCE_S, Clock, key

ROOT = Path(__file__).parents[3]
NOTHING = Charge(0, 0)
SHARED = {"requests_per_minute": 300, "tokens_per_minute": 5000, "concurrent_requests": 1000}

# A bridge of its own process: enters and ends until refused, prints how often it got in; then it
# keeps two requests open and waits to be killed.
OTHER = """
import sys, pathlib
from pipeline.access.budgets import open_budgets
from pipeline.access.charge import Charge
from pipeline.access.errors import RateLimited
from pipeline.access.permit import MeteredPermit
from tests.pipeline.access.conftest import key
limits, holds, data = eval(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
with open_budgets(data, patience_s=60, now_s=lambda: 5000.0) as budgets:
    print("open", flush=True)
    sys.stdin.readline()
    entered = 0
    while not holds or entered < holds:
        permit = MeteredPermit(key(**limits), budgets)
        try:
            permit.enter(Charge(10, 0))
            permit.confirm(Charge(20, 0))
        except RateLimited:
            permit.end(0)
            break
        entered += 1
        if not holds:
            permit.end(25)
    print(entered, flush=True)
    sys.stdin.readline()
"""


class Other:
    """Another process that uses the budgets in ``data``."""

    def __init__(self, data: Path, limits: dict[str, int], holds: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, repr(limits), str(holds), str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.line() == "open"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


def test_processes_share_one_budget_exactly(tmp_path: Path) -> None:
    """Three at once get no request and no token more, or less, than one alone would."""
    with Other(tmp_path, SHARED) as a, Other(tmp_path, SHARED) as b, Other(tmp_path, SHARED) as c:
        for one in (a, b, c):
            one.go()
        entered = [int(one.line()) for one in (a, b, c)]
    # 5000 tokens at 25 each; the last ones must fit with 20
    assert sum(entered) == 200
    with open_budgets(tmp_path, now_s=Clock()) as budgets:
        with budgets.account(key().digest) as account:
            assert account.tokens.level == 5000
            assert account.requests.level >= 200


def test_a_dead_process_gives_its_places_back(tmp_path: Path, clock: Clock) -> None:
    """SIGKILL, and SIGSTOP does not: a frozen bridge's requests still run."""
    limits = {"concurrent_requests": 2}
    with (
        Other(tmp_path, limits, holds=2) as other,
        open_budgets(tmp_path, patience_s=PATIENCE_S, now_s=clock) as budgets,
    ):
        other.go()
        assert other.line() == "2"
        other.process.send_signal(signal.SIGSTOP)
        with pytest.raises(RateLimited, match="2 requests open"):
            MeteredPermit(key(**limits), budgets).enter(NOTHING)
        other.process.kill()
        other.process.wait(30)
        MeteredPermit(key(**limits), budgets).enter(NOTHING)


def test_a_slot_that_is_used_again_begins_empty(tmp_path: Path, clock: Clock) -> None:
    """Nothing is left of the dead process that had it."""
    limits = {"concurrent_requests": 2}
    with Other(tmp_path, limits, holds=2) as other:
        other.go()
        assert other.line() == "2"
    with open_budgets(tmp_path, now_s=clock) as budgets:
        with budgets.account(key().digest) as account:
            assert account.num_open(100) == 0


def test_a_restart_gives_nobody_a_new_budget(tmp_path: Path, clock: Clock) -> None:
    """Levels outlive the processes; open requests do not."""
    limits = {"requests_per_minute": 1, "concurrent_requests": 5}
    with open_budgets(tmp_path, now_s=clock) as budgets:
        MeteredPermit(key(**limits), budgets).enter(NOTHING)
    with open_budgets(tmp_path, now_s=clock) as budgets:
        with pytest.raises(RateLimited, match="per minute"):
            MeteredPermit(key(**limits), budgets).enter(NOTHING)
        with budgets.account(key().digest) as account:
            assert account.num_open(1) == 0


def test_another_boot_begins_anew(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock started again: the old times mean nothing."""
    limits = {"requests_per_minute": 1}
    with open_budgets(tmp_path, now_s=clock) as budgets:
        MeteredPermit(key(**limits), budgets).enter(NOTHING)
    boot = tmp_path / "boot"
    boot.write_text("another\n")
    monkeypatch.setattr(module, "_BOOT", boot)
    with open_budgets(tmp_path, now_s=clock) as budgets:
        MeteredPermit(key(**limits), budgets).enter(NOTHING)


def test_a_full_table_takes_the_place_of_an_idle_key(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was not used for an hour and has nothing open; with none the answer is 503."""
    monkeypatch.setattr(module, "_SIZE", module._PAGE + 2 * module._RECORD)
    digests = [bytes([number]) * 32 for number in range(1, 5)]
    limits = {"requests_per_minute": 9, "concurrent_requests": 9}
    with open_budgets(tmp_path, now_s=clock) as budgets:
        busy = MeteredPermit(key(digest=digests[0], **limits), budgets)
        busy.enter(NOTHING)
        idle = MeteredPermit(key(digest=digests[1], **limits), budgets)
        idle.enter(NOTHING)
        idle.end(0)
        with pytest.raises(NoCapacity):
            MeteredPermit(key(digest=digests[2], **limits), budgets).enter(NOTHING)
        clock.now_s += 3601
        MeteredPermit(key(digest=digests[3], **limits), budgets).enter(NOTHING)
        busy.end(0)  # its record is still its own
        with budgets.account(digests[0]) as account:
            assert account.num_open(1) == 0
        with budgets.account(digests[3]) as account:
            assert account.num_open(9) == 1


def test_a_process_frozen_on_the_mutex_stops_nobody(tmp_path: Path, clock: Clock) -> None:
    """The others go on without it after their patience, and say so once."""
    told: list[int] = []
    with (
        open_budgets(tmp_path, now_s=clock) as frozen,
        open_budgets(
            tmp_path, patience_s=0.01, on_stuck=lambda: told.append(1), now_s=clock
        ) as budgets,
    ):
        held = frozen.account(key().digest)
        for _ in range(3):
            MeteredPermit(key(requests_per_minute=10), budgets).enter(NOTHING)
        assert told == [1]
        held.__exit__()
        with budgets.account(key().digest):
            pass
    assert told == [1]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    """And it holds no key, but hashes."""
    with open_budgets(tmp_path / "new"):
        assert os.stat(tmp_path / "new" / FILE).st_mode & 0o777 == 0o600


def test_a_directory_that_cant_be_used_is_named(tmp_path: Path) -> None:
    """A configuration error, at start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file") as caught:
        with open_budgets(tmp_path / "file"):
            pass
    assert caught.value.param == "mesh.data"


def test_more_bridges_than_slots_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start, in words."""
    monkeypatch.setattr(module, "NUM_SLOTS", 1)
    with open_budgets(tmp_path), pytest.raises(ConfigError, match="over 1 bridges"):
        with open_budgets(tmp_path):
            pass
