"""Recipes: few lines that make a whole trace, and what is wrong with others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from loadgen import scenarios
from loadgen.recipes import Part, Recipe, make_trace, read_recipe
from loadgen.traces import HASH_TOKENS, read_trace
from schemas.errors import ConfigError

PART = Part(kind="assistants", rate=20, system_prompts=5, input_len=400, turns=3, think_s=5)
RECIPE = Recipe(duration_s=30, part=(PART,), seed=1)


def test_the_same_recipe_makes_the_same_trace_and_a_repeat_another() -> None:
    """In order of time, about as many as the rate says, from the first second on."""
    made = make_trace(RECIPE)
    assert made == make_trace(RECIPE)
    assert made != make_trace(RECIPE, repeat=1)
    assert all(a.timestamp <= b.timestamp for a, b in pairwise(made))
    assert len(made) == pytest.approx(600, rel=0.3)
    early = sum(entry.timestamp < 10_000 for entry in made)
    assert early == pytest.approx(len(made) / 3, rel=0.4), "conversations go on from the start"


def test_assistants_begin_with_a_system_prompt_and_go_on_with_their_own_words() -> None:
    """As many beginnings as system prompts, at most; later turns begin with whole earlier ones."""
    made = make_trace(RECIPE)
    assert len({entry.hash_ids[0] for entry in made}) == 5
    full = [entry.hash_ids[: entry.input_length // HASH_TOKENS] for entry in made]
    longer = [ids for ids in full if any(ids != one and ids[: len(one)] == one for one in full)]
    assert len(longer) > len(made) / 4


def test_parts_share_nothing_and_keep_to_their_time_and_tenant() -> None:
    """Ids of two parts never meet."""
    late = Part(kind="no-reuse", rate=20, from_s=10, until_s=20, tenant="late")
    made = make_trace(Recipe(duration_s=30, part=(PART, late), seed=1))
    ours = [entry for entry in made if entry.tenant == "late"]
    others = [entry for entry in made if entry.tenant != "late"]
    assert ours
    assert all(10_000 <= entry.timestamp < 20_000 for entry in ours)
    ids = [{one for entry in part for one in entry.hash_ids} for part in (ours, others)]
    assert not ids[0] & ids[1]


def test_a_rate_is_multiplied_for_all_parts() -> None:
    """Twice the rate is about twice the requests."""
    assert RECIPE.at_rate(2.0).rate == 40
    doubled, plain = len(make_trace(RECIPE.at_rate(2.0))), len(make_trace(RECIPE))
    assert doubled == pytest.approx(2 * plain, rel=0.3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("duration_s = 1", "part"),
        ("duration_s = 0\n[[part]]\nkind = 'chat'\nrate = 1", "duration_s"),
        ("duration_s = 9\npart = []", "no \\[\\[part\\]\\]"),
        ("duration_s = 9\n[[part]]\nkind = 'chat'\nrate = 0", "rate"),
        ("duration_s = 9\n[[part]]\nkind = 'chats'\nrate = 1", "kind"),
        ("duration_s = 9\n[[part]]\nkind = 'chat'\nrate = 1\nlen = 3", "len"),
        ("duration_s = 9\n[[part]]\nkind = 'chat'\nrate = 1\nfrom_s = 5\nuntil_s = 5", "from 5 s"),
        ("duration_s = ", "no TOML"),
    ],
)
def test_a_wrong_recipe_is_refused_with_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    """The file and the field are named."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"wrong.toml.*{said}"):
        read_trace(path)


def test_a_recipe_without_requests_is_refused() -> None:
    """An empty trace is a mistake, not a measurement."""
    with pytest.raises(ConfigError, match="no request"):
        make_trace(Recipe(duration_s=0.001, part=(PART,)))


@pytest.mark.parametrize("name", scenarios.names("traces"))
def test_every_trace_of_a_scenario_can_be_made(name: str) -> None:
    """They parse, say what they stand for, and are small files."""
    path = scenarios.trace_file(name)
    assert path.read_text().startswith("# ")
    recipe = read_recipe(path)
    assert len(make_trace(recipe.at_rate(0.2))) > 10


def test_an_unknown_scenario_is_named_with_those_there_are() -> None:
    """A typing error costs nobody a search."""
    with pytest.raises(ConfigError, match=r"'nothing' among the traces .*shared-prefix"):
        scenarios.trace_file("nothing")
