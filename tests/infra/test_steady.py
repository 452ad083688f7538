"""What only tells does not stop what works."""

from __future__ import annotations

import asyncio
import errno
import io

import prometheus_client
import pytest

from infra import steady
from infra.log import make_logger, set_up_process
from infra.metrics import Metrics
from infra.steady import SteadyStream


class FullDisk(io.StringIO):
    """Takes nothing."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "_said", set())


def break_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the library raises."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("metrics are broken")

    for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram):
        for name in ("inc", "dec", "set", "observe", "labels"):
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, broken)


def test_a_count_that_is_refused_is_dropped_and_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A negative number of tokens, which once ended an engine, is a line on stderr."""
    metrics = Metrics()
    for _ in range(3):
        metrics.tokens_generated.inc(-1)
        metrics.requests_refused.labels("a", "b", "c").inc()
    metrics.tokens_generated.inc(2)
    assert b"mesh_tokens_generated_total 2.0" in metrics.exposition()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "metric=mesh_tokens_generated" in said[0]


def test_no_metric_call_raises_whatever_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters, gauges and histograms, with labels and without."""
    metrics = Metrics()
    break_metrics(monkeypatch)
    metrics.tokens_generated.inc()
    metrics.open_requests.dec()
    metrics.open_requests.inc()
    metrics.live_workers.labels("decode").set(1)
    metrics.stage_seconds.labels("decode").observe(0.1)
    metrics.e2e_seconds.observe(0.1)
    metrics.stage_handled.labels("decode", "ok").inc()


def test_they_count_what_the_librarys_count() -> None:
    """Amounts, and values on a bound, under the least and over the last."""
    told = []
    for kinds in (steady, prometheus_client):
        registry = prometheus_client.CollectorRegistry()
        done = kinds.Counter("done", "Done", ["by"], registry=registry)
        seconds = kinds.Histogram("s", "Time", ["by"], registry=registry, buckets=(0.1, 1))
        for amount in (1, 0, 2.5):
            done.labels("a").inc(amount)
        for value in (-1, 0.05, 0.1, 0.5, 1, 7, float("inf")):
            seconds.labels("a").observe(value)
        text = prometheus_client.generate_latest(registry).decode()
        told.append([line for line in text.splitlines() if "_created" not in line])
    assert told[0] == told[1]


def test_a_full_disk_takes_no_process_with_its_log() -> None:
    """Lines are lost, the program goes on; what is written later is there again."""
    make_logger("p", stream=SteadyStream(FullDisk())).error("engine_failed")  # type: ignore[arg-type]
    log = set_up_process("p", stream=FullDisk())
    log.error("engine_failed", reason="x")
    written = io.StringIO()
    stream = SteadyStream(written)
    stream.write("line")
    stream.flush()
    assert written.getvalue() == "line"
    written.close()
    stream.write("after the end")


class Counted(io.StringIO):
    """Knows how often it was written to, and flushed."""

    num_writes = 0
    num_flushes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        return super().write(text)

    def flush(self) -> None:
        self.num_flushes += 1


def test_the_lines_of_one_turn_leave_together() -> None:
    """One write and one flush per turn of the loop in which something was said; without a loop,
    each time."""
    written = Counted()
    log = set_up_process("p", stream=written)

    async def turns() -> None:
        for _ in range(2):
            for _ in range(5):
                log.info("stage_handled")
            await asyncio.sleep(0)
        log.info("stage_handled")

    asyncio.run(turns())
    assert written.num_flushes == 3
    asyncio.run(turns())  # another loop
    assert written.num_flushes == 6
    log.info("process_ended")
    assert written.num_flushes == 7
    assert written.num_writes == 7
    assert len(written.getvalue().splitlines()) == 23
