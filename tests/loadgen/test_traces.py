import json
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.synthetic import Kind, SyntheticSettings, synthesize
from loadgen.traces import HASH_TOKENS, TraceEntry, TraceWorkload, read_trace, write_trace
from schemas.errors import ConfigError

KINDS: tuple[Kind, ...] = get_args(Kind)
LINE = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}


def trace(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


def prompts(workload: TraceWorkload) -> list[tuple[int, ...]]:
    found = [request.prompt for request in workload.requests()]
    return [prompt for prompt in found if isinstance(prompt, tuple)]


def test_a_line_of_a_published_trace_is_read(tmp_path: Path) -> None:
    """Mooncake's fields, and others are left alone."""
    (entry,) = read_trace(trace(tmp_path, LINE | {"round": 3}))
    assert entry == TraceEntry(
        timestamp=27482, input_length=1100, output_length=52, hash_ids=(46, 47, 48)
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_length": 0}, "input_length is 0"),
        ({"output_length": -1}, "output_length is -1"),
        ({"timestamp": -5}, "timestamp is -5"),
        ({"hash_ids": [-1]}, "hash_ids"),
        ({"input_length": "many"}, "input_length"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    """Which line, and what is wrong with it; nothing is sent."""
    with pytest.raises(ConfigError, match=f"line 2: .*{said}"):
        read_trace(trace(tmp_path, LINE, LINE | change))


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    """An empty trace, or none at all, is an error of the option."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for path in (empty, tmp_path / "missing.jsonl"):
        with pytest.raises(ConfigError) as refused:
            read_trace(path)
        assert refused.value.param == "trace"


def test_equal_ids_are_equal_tokens_and_others_are_not() -> None:
    """Two prompts share exactly the tokens whose ids they share, whatever else is in the trace."""
    entries = (
        TraceEntry(timestamp=0, input_length=1500, output_length=5, hash_ids=(1, 2, 3)),
        TraceEntry(timestamp=1, input_length=1200, output_length=5, hash_ids=(1, 2, 9)),
        TraceEntry(timestamp=2, input_length=600, output_length=5),
        TraceEntry(timestamp=3, input_length=600, output_length=5),
    )
    first, second, third, fourth = prompts(TraceWorkload(entries=entries, model="m"))
    assert [len(first), len(second), len(third)] == [1500, 1200, 600]
    assert first[: 2 * HASH_TOKENS] == second[: 2 * HASH_TOKENS]
    assert first[2 * HASH_TOKENS] != second[2 * HASH_TOKENS]
    assert third != fourth
    alone = prompts(TraceWorkload(entries=entries[1:2], model="m"))
    assert alone == [second], "a prompt depends on its entry and the seed"
    assert prompts(TraceWorkload(entries=entries, model="m", seed=1))[0] != first


@given(
    scale=st.floats(0.01, 2),
    lengths=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 500)), min_size=1, max_size=5),
    most=st.integers(2, 1000),
)
def test_lengths_are_scaled_and_cut(
    scale: float, lengths: list[tuple[int, int]], most: int
) -> None:
    """Prompt and answer never exceed the limit, and have at least a token each."""
    entries = tuple(
        TraceEntry(timestamp=0, input_length=long, output_length=out, hash_ids=(7, 8))
        for long, out in lengths
    )
    workload = TraceWorkload(entries=entries, model="m", scale=scale, max_tokens=most)
    for request, (long, out) in zip(workload.requests(), lengths, strict=True):
        assert len(request.prompt) == request.input_len
        assert 1 <= request.input_len <= max(1, round(long * scale))
        assert 1 <= request.output_len <= max(1, round(out * scale))
        assert request.input_len + request.output_len <= most


def test_times_begin_at_the_first_entry_and_are_divided_by_the_speed() -> None:
    """A trace that starts late is sent at once."""
    entries = tuple(
        TraceEntry(timestamp=time, input_length=1, output_length=1) for time in (5000, 7000, 9000)
    )
    workload = TraceWorkload(entries=entries, model="m")
    assert list(workload.offsets_s(4.0)) == [0.0, 0.5, 1.0]


def test_warmup_prompts_are_of_no_entry() -> None:
    """Warming up puts nothing into a cache that the trace would find."""
    entries = (TraceEntry(timestamp=0, input_length=40, output_length=3, hash_ids=(1,)),)
    workload = TraceWorkload(entries=entries, model="m")
    (warm,) = workload.warmup(1)
    assert warm.number < 0
    assert warm.prompt not in prompts(workload)


@pytest.mark.parametrize("kind", KINDS)
def test_a_synthetic_trace_is_one(tmp_path: Path, kind: Kind) -> None:
    """Every kind: as many requests as asked, in order of time, readable, the same once more, and
    about as fast as asked."""
    settings = SyntheticSettings(kind=kind, num_requests=400, rate=20.0, seed=3)
    entries = synthesize(settings)
    assert len(entries) == 400
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(entries))
    assert write_trace(entries, tmp_path / "t.jsonl") == 400
    assert read_trace(tmp_path / "t.jsonl") == entries
    assert synthesize(settings) == entries
    if kind != "chat":  # whose conversations only begin to overlap
        assert entries[-1].timestamp == pytest.approx(20_000, rel=0.3)
    for entry in entries:
        assert len(entry.hash_ids) == -(-entry.input_length // HASH_TOKENS)


def test_what_each_kind_shares() -> None:
    """No reuse shares no id; system prompts are shared, some much more than others; a turn of a
    chat begins with a whole earlier prompt; tenants differ tenfold; a tail is heavy."""

    def made(kind: Kind) -> tuple[TraceEntry, ...]:
        return synthesize(SyntheticSettings(kind=kind, num_requests=1000, rate=20.0))

    ids = [one for entry in made("no-reuse") for one in entry.hash_ids]
    assert len(ids) == len(set(ids))
    shared = [entry.hash_ids[:3] for entry in made("shared-prefix")]
    counts = sorted((shared.count(prefix) for prefix in set(shared)), reverse=True)
    assert len(counts) == 20
    assert counts[0] > 5 * counts[-1]
    seen: set[tuple[int, ...]] = set()
    num_continued = 0
    for entry in made("chat"):
        full = entry.hash_ids[: entry.input_length // HASH_TOKENS]
        num_continued += any(full[:end] in seen for end in range(1, len(full) + 1))
        seen.add(full)
    assert num_continued > 500
    tenants = [entry.tenant for entry in made("tenants")]
    assert 5 < tenants.count("large") / tenants.count("small") < 20
    lengths = sorted(entry.input_length for entry in made("heavy-tail"))
    assert sum(lengths[-100:]) > 0.25 * sum(lengths)


def test_settings_of_a_synthetic_trace_are_checked() -> None:
    """The field is named."""
    for field, value in (("rate", 0.0), ("num_requests", 0), ("input_len", -1)):
        given_: dict[str, object] = {"kind": "chat", "num_requests": 1, "rate": 1.0, field: value}
        with pytest.raises(ConfigError) as refused:
            SyntheticSettings(**given_)  # type: ignore[arg-type]
        assert refused.value.param == field
