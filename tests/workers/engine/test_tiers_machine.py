"""Two tiers, small enough that everything is evicted, preempted and brought back all the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.prefix_hash import prefix_hashes
from schemas.requests import SamplingParams
from tests.workers.engine.simulated_engines import (
    BLOCK_SIZE,
    StrictRunner,
    expected_answer,
    request_of,
)
from tests.workers.engine.tiered_engines import make_tiered
from workers.engine.api import EngineRequest, Sampled, ScheduledSequence, StepReport
from workers.kv.api import BlockName, Pin, Tier

FAULT = 43  # a prompt that ends with it can't be computed to its end


class FaultyRunner(StrictRunner):
    """Fails when the last token of a prompt is ``FAULT``."""

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        for scheduled in batch:
            last = scheduled.num_prompt_tokens - 1
            reaches = scheduled.start <= last < scheduled.start + scheduled.count
            if reaches and scheduled.token_ids[last] == FAULT:
                raise ValueError("a faulty prompt")
        return super().execute(batch)


class Heard:
    """What a listener believes that the tiers hold."""

    def __init__(self) -> None:
        self.held: dict[Tier, dict[bytes, bytes]] = {"device": {}, "host": {}}

    def stored(self, tier: Tier, *blocks: BlockName) -> None:
        for block in blocks:
            assert block.block_hash not in self.held[tier], "stored twice"
            self.held[tier][block.block_hash] = block.parent

    def removed(self, tier: Tier, *hashes: bytes) -> None:
        for block_hash in hashes:
            del self.held[tier][block_hash]


class TieredMachine(RuleBasedStateMachine):
    """Requests that come, are cancelled, set back, held and failed, copies that end late or never
    begin, readers that pin, and bits that flip. Every token is the one that a run alone would give;
    both tiers' books are right after each call, and at the end nothing is held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.tiered = make_tiered(
            13,
            22,
            self.heard,
            FaultyRunner,
            max_batch_tokens=11,
            max_num_sequences=4,
        )
        self.live: dict[str, tuple[list[list[int]], list[int]]] = {}  # answers, tokens seen
        self.faulty: set[str] = set()
        self.held: set[str] = set()
        self.pins: list[Pin] = []
        self.num_added = 0

    def teardown(self) -> None:
        for pin in self.pins:
            self.tiered.host.unpin(pin)
        for key in self.held:
            self.release_key(key)
        self.held.clear()
        for _ in range(2000):
            if not self.tiered.engine.has_work() and not self.tiered.move():
                break
            self.step(1)
            for key in list(self.held):
                self.release_key(key)
        assert not self.live, "a request was never finished"
        self.tiered.check_idle()
        self.tiered.engine.pool.close()

    @rule(
        stem=st.integers(3, 6),
        length=st.integers(1, 26),
        end=st.sampled_from([40, 41, 42, FAULT]),
        count=st.sampled_from([1, 1, 2]),
        max_tokens=st.integers(1, 14),
        hold=st.sampled_from([False, False, True]),
    )
    def add(
        self, stem: int, length: int, end: int, count: int, max_tokens: int, hold: bool
    ) -> None:
        """Prompts of one stem share their beginning."""
        prompt_ids = (*(stem + position // 6 for position in range(length)), end)
        key = f"r{self.num_added}"
        self.num_added += 1
        request = request_of(
            key, prompt_ids, n=count, max_tokens=max_tokens, ignore_eos=True, hold_after_first=hold
        )
        answers = [
            expected_answer(prompt_ids, request.sampling, index)[0] for index in range(count)
        ]
        self.tiered.engine.add(request)
        self.live[key] = (answers, [0] * count)
        if end == FAULT:
            self.faulty.add(key)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.tiered.engine.step())

    def take(self, report: StepReport) -> None:
        for failed in report.failed:
            assert failed.key in self.faulty
            del self.live[failed.key]
        for output in report.outputs:
            assert output.key not in self.faulty
            answers, seen = self.live[output.key]
            assert output.number == seen[output.index]
            assert output.token_id == answers[output.index][output.number]
            seen[output.index] += 1
        for finished in report.finished:
            answers, seen = self.live.pop(finished.key)
            assert seen == [len(tokens) for tokens in answers]
            assert finished.num_host_tokens <= finished.num_cached_tokens
        self.held |= {held.key for held in report.held}

    @rule(count=st.integers(1, 6))
    def move(self, count: int) -> None:
        for _ in range(count):
            self.tiered.mover.work()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        self.release_key(key)
        self.held.discard(key)

    def release_key(self, key: str) -> None:
        self.tiered.engine.release(key)
        del self.live[key]
        self.held = self.held - {key}

    @rule(stem=st.integers(3, 6), length=st.integers(4, 24))
    def pin(self, stem: int, length: int) -> None:
        """Another worker reads."""
        ids = tuple(stem + position // 6 for position in range(length))
        self.pins.append(self.tiered.host.pin(prefix_hashes(ids, BLOCK_SIZE, b"")))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.tiered.host.unpin(self.pins.pop(0))

    @rule(stem=st.integers(3, 6), bit=st.integers(0, 7))
    def flip(self, stem: int, bit: int) -> None:
        """A bit of a stem's first block in host memory flips, if it is there."""
        ids = tuple(stem + position // 6 for position in range(BLOCK_SIZE))
        pin = self.tiered.host.pin(prefix_hashes(ids, BLOCK_SIZE, b""))
        for slot in pin.slots:
            self.tiered.engine.pool.slots[slot][bit] ^= 1 << bit
        self.tiered.host.unpin(pin)

    @invariant()
    def books_are_right(self) -> None:
        self.tiered.check()
        pool, host = self.tiered.engine.blocks, self.tiered.host
        for block_hash in self.heard.held["device"]:
            assert pool.find(block_hash) is not None
        for block_hash in self.heard.held["host"]:
            assert host.num_leading([block_hash]) == 1
        for stem in range(3, 7):
            ids = tuple(stem + position // 6 for position in range(24))
            for block_hash in prefix_hashes(ids, BLOCK_SIZE, b""):
                is_found = pool.find(block_hash) is not None
                assert is_found == (block_hash in self.heard.held["device"])
                is_below = host.num_leading([block_hash]) == 1
                assert is_below == (block_hash in self.heard.held["host"])


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_machine_reaches_what_it_is_for() -> None:
    """The tiers are small enough: blocks are evicted from both, sequences are preempted, and
    blocks come back. Else the machine would prove little."""
    tiered = make_tiered(13, 22, max_batch_tokens=11, max_num_sequences=4)
    for turn in range(3):
        for number in range(5):
            prompt_ids = (7 + 9 * number,) * 20
            sampling = SamplingParams(seed=1, max_tokens=14, ignore_eos=True)
            key = f"{turn}.{number}"
            tiered.engine.add(EngineRequest(key=key, prompt_ids=prompt_ids, sampling=sampling))
        tiered.run()
    assert tiered.engine.scheduler.num_preemptions > 0
    assert tiered.tally.count("host", "promoted") > 0
    assert tiered.tally.count("host", "dropped") > 0
    assert tiered.tally.count("device", "evicted") > 0
    tiered.check_idle()
