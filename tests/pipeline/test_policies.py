"""The policy file: what it says, what is refused, and that it is read again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from infra.log import make_logger
from pipeline.policies import PolicyFile, parse_policies
from pipeline.policy import Policy
from schemas.errors import ConfigError, InvalidRequest
from schemas.requests import Slo
from tests.pipeline.rig import LogLines

WHOLE = """
[models.big]
over_budget = ["wait", "clamp", "fallback", "refuse"]
max_wait_s = 5
clamp_floor = 32
fallback = "small"
enter = 0.9
leave = 0.7
horizon_s = 20
default_class = "chat"
classes.chat = { ttft_ms = 500, tbt_ms = 50 }
classes.batch = { ttft_ms = 30000 }
shares = { "0" = 0.9, "-1" = 0.5 }

[models."*"]
over_budget = ["refuse"]
"""


def read(text: str, models: tuple[str, ...] | None = ("big", "small")) -> Policy:
    return parse_policies(text.encode(), "policies.toml", models).of("big")


def test_every_field_is_read() -> None:
    """What the file says is what a model gets; others get that of ``*``."""
    chat = Slo(ttft_ms=500, tbt_ms=50, name="chat")
    assert read(WHOLE) == Policy(
        rungs=("wait", "clamp", "fallback", "refuse"),
        max_wait_s=5, clamp_floor=32, fallback="small", enter=0.9, leave=0.7, horizon_s=20,
        default_class="chat", classes={"chat": chat, "batch": Slo(ttft_ms=30000, name="batch")},
        shares=((-1, 0.5), (0, 0.9)),
    )  # fmt: skip
    policies = parse_policies(WHOLE.encode(), "policies.toml")
    assert policies.of("small") == Policy()
    assert parse_policies(b"", "policies.toml").of("big") == Policy()


def test_times_are_the_requests_own_else_its_classs() -> None:
    """A request may name a class, times, both, or nothing; what it leaves out its class says."""
    policy = read(WHOLE)
    assert policy.slo_of(Slo()) == Slo(ttft_ms=500, tbt_ms=50, name="chat")
    assert policy.slo_of(Slo(name="batch")) == Slo(ttft_ms=30000, name="batch")
    assert policy.slo_of(Slo(name="chat", ttft_ms=100)).ttft_ms == 100
    assert policy.slo_of(Slo(tbt_ms=20)) == Slo(tbt_ms=20), "no class: nothing else is promised"
    with pytest.raises(InvalidRequest, match="no SLO class 'gold'") as raised:
        policy.slo_of(Slo(name="gold"))
    assert raised.value.param == "slo.name"
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="ttft_ms must be from"):
            policy.slo_of(Slo(ttft_ms=wrong))


def test_shares_rise_with_priority() -> None:
    """Whoever is at or under a priority gets its share; above the last, all."""
    policy = read(WHOLE)
    assert [policy.share_of(p) for p in (-9, -1, 0, 1)] == [0.5, 0.5, 0.9, 1.0]


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("models = 3", "models", "are tables"),
        ("[model.big]", "model", "none of"),
        ("[models]\nbig = 1", "models.big", "no table"),
        ("[models.big]\nwait_s = 1", "models.big.wait_s", "none of over_budget"),
        ("[models.big]\nover_budget = ['give up']", "models.big.over_budget", "no list of"),
        ("[models.big]\nover_budget = []", "models.big.over_budget", "no list of"),
        ("[models.big]\nover_budget = ['refuse', 'wait']", "models.big.over_budget", "after"),
        ("[models.big]\nover_budget = ['wait', 'wait']", "models.big.over_budget", "twice"),
        ("[models.big]\nover_budget = ['fallback']", "models.big.fallback", "missing"),
        ("[models.big]\nfallback = 'small'", "models.big.over_budget", "does not stand here"),
        ("[models.big]\nleave = 1.5", "models.big.leave", "is over enter"),
        ("[models.big]\nclamp_floor = 0", "models.big.clamp_floor", "0 is not from 1"),
        ("[models.big]\ndefault_class = 'chat'", "models.big.default_class", "no class here"),
        ("[models.big]\nclasses.a = {}", "models.big.classes", "a: give ttft_ms"),
        ("[models.big]\nclasses.a = {tpot_ms = 1}", "models.big.classes", "and nothing else"),
        ("[models.big]\nclasses.a = {ttft_ms = -1}", "models.big.classes", "a: -1 is not from 1"),
        ("[models.big]\nshares = {low = 0.5}", "models.big.shares", "no whole number"),
        ("[models.big]\nshares = {'0' = 0.5, '1' = 0.2}", "models.big.shares", "the greater"),
        ("[models.big", "control.policies", "no TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, field: str, reason: str) -> None:
    """The error names file, field and reason; nothing of such a file is used."""
    with pytest.raises(ConfigError, match=reason) as raised:
        read(text)
    assert raised.value.param == field
    assert "policies.toml" in raised.value.message


_TO = "[models.{}]\nover_budget = ['fallback']\nfallback = '{}'\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (_TO.format("big", "tiny"), "no model is called 'tiny'"),
        (_TO.format("big", "big"), "circle: big -> big"),
        (_TO.format("big", "small") + _TO.format("small", "big"), "circle: big -> small -> big"),
        (_TO.format('"*"', "small"), "circle: small -> small"),
    ],
)
def test_fallbacks_lead_somewhere(text: str, reason: str) -> None:
    """To a model that is there, and never back."""
    with pytest.raises(ConfigError, match=reason):
        read(text)


def test_the_file_is_read_again(tmp_path: Path) -> None:
    """A change counts without a restart; a mistake changes nothing and is logged once; a fallback
    that is registered later is fine from then on."""
    path, lines, models = tmp_path / "policies.toml", LogLines(), {"big"}
    log = make_logger("test", stream=lines.stream)
    path.write_text("[models.big]\nmax_wait_s = 1\n")
    file = PolicyFile(path, log, models=lambda: models)
    assert file.of("big").max_wait_s == 1
    for text in ("[models.big]\nmax_wait_s = 2\n", "[models.big]\nmax_wait_s = no\n"):
        path.write_text(text)
        for _ in range(3):
            file.refresh()
    assert file.of("big").max_wait_s == 2
    assert len(lines.events("policies_read")) == 2
    (refused,) = lines.events("policies_refused")
    assert refused["field"] == "control.policies"
    path.write_text(_TO.format("big", "small"))
    file.refresh()
    assert not file.of("big").fallback
    models.add("small")
    file.refresh()
    assert file.of("big").fallback == "small"
    os.remove(path)
    file.refresh()
    assert file.of("big").fallback == "small", "a file that is gone changes nothing"


def test_without_a_file_nothing_is_promised() -> None:
    """And nothing can be wrong with it."""
    file = PolicyFile(None, make_logger("test"), models=lambda: ())
    file.refresh()
    assert file.of("any") == Policy()


def test_the_readmes_file_is_one() -> None:
    """The example can be used as it stands by a mesh of its two models."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    found = re.search(r"<!-- test: policies -->\n```toml\n(.*?)```", readme, re.DOTALL)
    assert found
    policies = parse_policies(found[1].encode(), "README.md", ("llama-70b", "llama-8b"))
    assert policies.of("llama-70b").fallback == "llama-8b"
    assert policies.of("llama-8b").rungs == ("wait", "refuse")
