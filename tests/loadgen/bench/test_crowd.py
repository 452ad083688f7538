"""The figures of ``mesh bench crowd``."""

from __future__ import annotations

import msgspec
import pytest

from loadgen.bench import crowd as crowd_module
from loadgen.bench.crowd import Crowd, CrowdSettings, make_result, num_at_once
from loadgen.bench.memory import MemorySample
from loadgen.machine import MachineNote
from loadgen.measure import RequestResult
from schemas.errors import ConfigError


def result(number: int, *event_s: float, error: str = "") -> RequestResult:
    made = RequestResult(number=number, output_len=2)
    for at_s in event_s:
        made.add_event(at_s)
    if error:
        made.fail(error, "no")
    else:
        made.state = "completed"
    return made


def test_streams_at_once_are_counted_from_first_to_last_token() -> None:
    """What waits, or failed before its first token, is no stream; one that begins when another
    ends does not run beside it."""
    results = [result(0, 1.0, 4.0), result(1, 2.0, 3.0), result(2, 4.0, 5.0), result(3, error="x")]
    assert num_at_once(results) == 2
    assert num_at_once([result(0, error="x")]) == 0


def test_figures_say_what_went_wrong_and_how_memory_went() -> None:
    """Errors by kind; megabytes at the start, with all waiting, at most and at the end."""
    mb = 1_000_000
    samples = [MemorySample(float(t), {"bridge": n * mb}) for t, n in enumerate((60, 300, 200))]
    crowd = Crowd(
        results=[result(0, 1.0, 2.0), result(1, error="queue_full")],
        samples=samples,
        all_queued=MemorySample(0.5, {"bridge": 250 * mb}),
        num_waiting_peak=2,
        drain_s=4.0,
    )
    machine = MachineNote.now()
    content = msgspec.json.decode(make_result(CrowdSettings(), crowd, machine).to_json())
    assert (content["requests"], content["errors"]) == (2, 1)
    assert content["errors_by_kind"] == {"queue_full": 1}
    assert content["memory_mb"]["bridge"] == {
        "start": 60.0, "queued": 250.0, "peak": 300.0, "end": 200.0,
    }  # fmt: skip
    assert content["tokens_per_s"] == 0.5
    assert "simulated engine" in content["notes"][0]


@pytest.mark.parametrize("name", ["queued", "streams", "output_len"])
def test_numbers_out_of_range_are_refused(name: str) -> None:
    """By the name of the flag."""
    with pytest.raises(ConfigError) as caught:
        CrowdSettings(**{name: 0})
    assert caught.value.param == name


def test_more_connections_than_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started; over the bus there is one connection for all."""
    monkeypatch.setattr(crowd_module, "raise_file_limit", lambda: 1024)
    with pytest.raises(ConfigError, match="the limit is 1024"):
        CrowdSettings(queued=2000)
    CrowdSettings(queued=2000, over="bus")


def test_the_mesh_refuses_none_of_them() -> None:
    """Limits of the queue and of the bridge are over what is sent; workers hold the streams."""
    env = CrowdSettings(queued=5000, streams=1001).environment()
    assert int(env["MESH_CONTROL_MAX_QUEUED_REQUESTS"]) > 5000
    assert int(env["MESH_BRIDGE_MAX_OPEN_REQUESTS"]) > 5000
    assert int(env["MESH_BRIDGE_MAX_CONNECTIONS"]) > 5000
    assert 2 * int(env["MESH_WORKER_MAX_NUM_SEQUENCES"]) >= 1001
