from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from infra.bus import Bus
from infra.config import BusConfig, WorkerConfig
from infra.parse import ModelSource
from pipeline.cost_model import scaled
from pipeline.profile_files import format_profile, shipped_profiles
from pipeline.profiles import ProfileBook
from schemas.errors import BusUnavailable, ConfigError
from schemas.profiles import WorkerProfile
from tests.conftest import Connect
from tests.tiny_models import tiny_model
from tests.workers.engine.simulated_engines import info_of, make_engine
from tests.workers.test_service import make_beat
from tests.workers.workplace import Workplace, until
from workers.factory import build_engine
from workers.own_profile import begin_with_own, named_profile, own_name
from workers.step_meter import StepMeter

H100 = shipped_profiles()["h100-llama-8b"]
log = structlog.get_logger("test")


def config_of(folder: Path, **settings: object) -> WorkerConfig:
    bus = BusConfig(data=folder)
    source = ModelSource("tiny", str(folder))
    settings = {"engine": "simulated", **settings}
    return WorkerConfig(bus=bus, model=source, **settings)  # type: ignore[arg-type]


async def test_a_profile_is_found_by_name_or_file(
    bus: Bus, connect: Connect, tmp_path: Path
) -> None:
    """Shipped ones, those of the registry, which a worker may read, and files."""
    await ProfileBook(bus).put(WorkerProfile(name="mine", costs=H100.costs))
    worker = await connect("worker")
    file = tmp_path / "own.toml"
    file.write_text(format_profile(WorkerProfile(name="own", costs=H100.costs)))
    assert await named_profile(worker, config_of(tmp_path)) is None
    for text, name in ((H100.name, H100.name), ("mine", "mine"), (str(file), "own")):
        found = await named_profile(worker, config_of(tmp_path, profile=text))
        assert found is not None
        assert found.name == name
    with pytest.raises(ConfigError, match=r"'h100'; there are a100-.*, mine, and files") as caught:
        await named_profile(worker, config_of(tmp_path, profile="h100"))
    assert caught.value.param == "worker.profile"


def test_a_simulated_engine_is_the_worker_of_its_profile(tmp_path: Path) -> None:
    """Its costs, at the speed that is set, and its KV cache; all of it told to others."""
    folder = tiny_model(tmp_path)
    engine, _ = build_engine(config_of(folder, profile="-", speed=4.0, role="prefill"), H100)
    with engine.pool:
        assert engine.meter.costs == scaled(H100.costs, 0.25)
        assert engine.meter.profile == H100.name
        assert engine.meter.parts == ("prefill",)
        assert engine.info.num_blocks == H100.kv_tokens // 16
        assert engine.info.kv_token_bytes == H100.kv_token_bytes


def test_a_real_engine_begins_with_a_profile(tmp_path: Path) -> None:
    """It tells the profile's costs until it knows better, and its own KV cache."""
    folder = tiny_model(tmp_path)
    config = config_of(folder, engine="torch", kernels="general", dtype="fp32", threads=1)
    engine, served = build_engine(config, H100)
    with engine.pool:
        assert (engine.meter.costs, engine.meter.profile) == (H100.costs, H100.name)
        assert engine.info.kv_token_bytes == engine.info.block_bytes // 16
        assert own_name(served, engine.info, 1) == f"{served}.torch-fp32.cpu-1"


def test_a_kind_of_worker_has_a_name() -> None:
    """Model, engine, and threads or the device: what its speed depends on."""
    info = replace(info_of(4), kind="cuda", dtype="bf16", device="NVIDIA H200")
    assert own_name("tiny@1", info, 3) == "tiny@1.cuda-bf16.NVIDIA-H200"
    assert own_name("tiny@1", replace(info, device=""), 3) == "tiny@1.cuda-bf16.cpu-3"


async def test_a_worker_begins_as_its_like_were_measured(bus: Bus) -> None:
    """Nothing registered, nothing known. Other threads are better than nothing, another model is
    not, and an engine whose costs are chosen needs nothing."""
    engine = make_engine()
    await begin_with_own(bus, engine, "tiny@1", 2, log)
    assert engine.meter.costs is None
    name = own_name("tiny@1", engine.info, 2)
    await ProfileBook(bus).put(WorkerProfile(name=name, costs=H100.costs))
    await begin_with_own(bus, engine, "tiny@1", 2, log)
    assert (engine.meter.costs, engine.meter.profile) == (H100.costs, name)
    other = make_engine()
    await begin_with_own(bus, other, "tiny@1", 1, log)
    assert (other.meter.costs, other.meter.profile) == (scaled(H100.costs, 2.0), name)
    stranger = make_engine()
    await begin_with_own(bus, stranger, "tiny@2", 2, log)
    assert stranger.meter.costs is None
    chosen = make_engine()
    chosen.meter = StepMeter.of_known(scaled(H100.costs, 2.0))
    await begin_with_own(bus, chosen, "tiny@1", 2, log)
    assert chosen.meter.profile == ""


async def test_a_profile_that_can_not_be_read_holds_up_nobody(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was told of none starts without it, and says so."""

    async def fails(*_: object) -> None:
        raise BusUnavailable("away")

    monkeypatch.setattr(ProfileBook, "all", fails)
    engine = make_engine()
    with capture_logs() as lines:
        await begin_with_own(bus, engine, "tiny@1", 2, log)
    assert engine.meter.costs is None
    assert [line["event"] for line in lines] == ["profile_not_read"]


async def test_a_worker_that_works_learns(place: Workplace) -> None:
    """The costs of its steps stand in its beats as soon as it knows them."""

    class Eager(StepMeter):
        is_due = True  # type: ignore[assignment]

        def learn(self) -> None:
            if len(self.samples()) > 2:
                self.costs = H100.costs

    worker = await place.worker("b", "both")
    worker.engine.meter = Eager()
    await until(lambda: worker.incarnations)
    record = await place.ask()
    place.check(record, await place.answer(record))
    await until(lambda: make_beat(worker).costs == H100.costs)
