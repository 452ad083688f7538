import os
from dataclasses import replace

import pytest

from loadgen.bench import sse_load
from loadgen.bench.processes import ProcessGroup, pids_by_kind
from loadgen.bench.sse_load import LoadFigures, LoadOrder, run_order
from loadgen.bench.stream import make_result
from loadgen.bench.stream_mesh import StreamSettings
from loadgen.bench.stream_samples import Samples, ratios
from loadgen.machine import MachineNote
from schemas.errors import ConfigError
from tests.loadgen.sse_server import SseServer, refusal, sse_server

SETTINGS = StreamSettings(
    streams=(8,),
    repeats=2,
    requests_per_stream=1,
    input_len=4,
    output_len=10,
    speed=10.0,
    is_split=False,
)


def load(wall_s=1.0, ttft_ms=5.0, cpu_s=0.1):
    spread = {"p50": ttft_ms, "p99": 2 * ttft_ms}
    return LoadFigures(
        num_completed=8,
        num_failed=0,
        num_events=88,
        wall_s=wall_s,
        cpu_s=cpu_s,
        ttft_ms=spread,
        gap_ms=spread,
    )


def samples(*, wall_s, ttft_ms, cpu_s):
    made = Samples()
    for _ in range(2):
        made.loads.append(load(wall_s, ttft_ms))
        made.cpu_s.append({"bridge": cpu_s, "worker": cpu_s})
        made.num_tokens.append(80)
    return made


def test_one_number_of_streams_gives_the_figures_themselves() -> None:
    """The keys that readers of the JSON rely on stand at its top."""
    one = samples(wall_s=0.5, ttft_ms=5.0, cpu_s=0.0008)
    result = make_result(SETTINGS, {"mesh": {8: one}}, MachineNote.now(), None)
    assert result.figures["chunks_s"] == 160.0
    assert result.figures["ttft_ms"] == {"p50": 5.0, "p99": 10.0}
    assert result.figures["cpu_us_per_chunk"] == {"bridge": 10.0, "worker": 10.0, "total": 20.0}


def test_ratios_are_ours_divided_by_theirs() -> None:
    """Under 1 is cheaper and sooner; over 1 is more tokens per second."""
    ours = samples(wall_s=0.5, ttft_ms=5.0, cpu_s=0.001)
    theirs = samples(wall_s=1.0, ttft_ms=10.0, cpu_s=0.004)
    assert ratios(ours, theirs) == {"cpu_us_per_chunk": 0.25, "chunks_s": 2.0, "ttft_p50": 0.5}


def test_a_load_at_its_limit_is_told() -> None:
    """Figures that the load's own process may have held back say so."""
    one = samples(wall_s=0.1, ttft_ms=5.0, cpu_s=0.001)
    notes = make_result(SETTINGS, {"mesh": {8: one}}, MachineNote.now(), None).notes
    assert any("at its limit" in note for note in notes)


@pytest.mark.parametrize(
    ("param", "value"),
    [("streams", ()), ("streams", (0,)), ("repeats", 0), ("speed", 0.0), ("output_len", 5000)],
)
def test_settings_out_of_range_name_their_flag(param: str, value: object) -> None:
    """What can't be measured is refused before anything starts."""
    with pytest.raises(ConfigError) as caught:
        replace(SETTINGS, **{param: value})
    assert caught.value.param == param


def test_events_are_counted_wherever_reads_tear_them() -> None:
    """An event in two pieces is one event; pieces with several count them all."""
    whole = b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    for cut in range(len(whole) + 1):
        stream = sse_load._Stream(sse_load.array("d"))
        for part in (whole[:cut], whole[cut:]):
            stream.on_body(200, part)
        assert (stream.num_events, stream.is_done) == (2, True), cut


async def test_an_order_is_carried_out_over_http() -> None:
    """Each answer is read to its end; a refusal counts as a failure and says why."""
    async with sse_server(SseServer()) as server:
        order = LoadOrder(
            url=server.url, model="m", num_streams=2, num_requests=4, input_len=3, output_len=5
        )
        figures = await run_order(order)
        server.refusal = refusal(503, "no room")
        refused = await run_order(order)
    assert (figures.num_completed, figures.num_failed) == (4, 0)
    assert figures.num_events == 4 * 6  # usage is an event, too
    assert (refused.num_completed, refused.num_failed) == (0, 4)
    assert "no room" in refused.error
    assert figures.ttft_ms["p99"] >= figures.ttft_ms["p50"] > 0


def test_processes_are_counted_by_kind() -> None:
    """CPU time only grows; kinds keep their names."""
    group = ProcessGroup(pids_by_kind([f"us={os.getpid()}"]))
    before_s = group.cpu_s()
    assert group.kinds == ("us",)
    assert group.since(before_s)["us"] >= 0


def test_processes_that_nobody_has_are_refused() -> None:
    """A wrong id is a matter of settings, and is named."""
    with pytest.raises(ConfigError, match="no process"):
        ProcessGroup({"us": [2**22 + 1]})
    with pytest.raises(ConfigError, match="NAME=PID"):
        pids_by_kind(["12"])
