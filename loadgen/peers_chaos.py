"""The faults of ``mesh chaos`` against any OpenAI-compatible server, by its address and pids.

    python -m loadgen.peers_chaos --url http://127.0.0.1:8000 --model NAME \\
        --pid worker=123 --pid frontend=124 --verb kill --verb freeze --count 3

For side-by-side figures: the same requests, the same judgement of each stream against an
undisturbed run, the same table. Text is compared, or, where a server answers the same request
differently each time (simulated ones do), tokens are counted. A stream that broke is a failed
request, since such servers can't resume. With ``--restart`` whoever was ended is started again as
it was: same command, environment and directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from loadgen.chaos.answer import Answer, compare
from loadgen.chaos.cases import Case, make_cases
from loadgen.chaos.clients import SseClient
from loadgen.chaos.mesh import until
from loadgen.chaos.peer import Peer, PeerSettings
from loadgen.chaos.report import ChaosReport, Tally
from loadgen.chaos.resume import NoResume
from schemas.errors import MeshError

READY_S = 120.0  # for a server to start and to answer
BACK_S = 20.0  # for one to mend itself
_STAGGER_S = 0.4
_LATE_S = 1.0
_HALF_WAY = (0.1, 0.65)  # share of all tokens that came when the blow falls
_CONTEXT_LENGTH = 2048
_USUAL_CASES = ("greedy", "greedy-long", "greedy-n2")  # what servers without a seed can repeat


class PeerFailed(MeshError):
    """The server did not answer, undisturbed."""

    code = "peer_failed"


async def run_peer_chaos(settings: PeerSettings, console: Console) -> ChaosReport:
    """All rounds: each verb on each process, in turn.

    Raises:
        PeerFailed: there is nothing to compare with.
        ConfigError: a pid that nobody has.
    """
    told = {"url": settings.url, "model": settings.model, "streams": settings.num_streams,
            "tokens": settings.num_tokens, "freeze_s": settings.freeze_s}  # fmt: skip
    report = ChaosReport(
        engine="peer", settings=told, title=f"chaos of {settings.model} at {settings.url}"
    )
    client = SseClient(
        [settings.url], settings.model, NoResume(), stall_s=settings.timeout_s, is_mesh=False
    )
    rng = random.Random(settings.seed)
    async with _peer(settings) as peer:
        cases = await _undisturbed(settings, client)
        for name, (_, answer) in cases.items():
            how = "token events are counted" if answer.is_counted else "text is compared"
            report.notes.append(f"{name}: {how}")
        kinds = itertools.cycle(itertools.product(settings.pids, settings.verbs))
        for name, verb in itertools.islice(kinds, settings.count):
            tally = await _round(settings, client, peer, cases, rng, (name, verb))
            report.of(f"{verb}-{name}", verb).add(tally)
            console.print(f"{verb} {name}: {tally.streams} streams, {tally.failed_requests} failed")
            if not await _is_back(settings, client, peer, cases, (name, verb), report):
                break
            if settings.restarts and verb != "freeze":
                await asyncio.sleep(settings.settle_s)
    return report


async def _is_back(
    settings: PeerSettings,
    client: SseClient,
    peer: Peer,
    cases: dict[str, tuple[Case, Answer]],
    what: tuple[str, str],
    report: ChaosReport,
) -> bool:
    """Whether the server answers again, by itself or, if we may, with the struck process new."""
    case = next(iter(cases.values()))[0]
    name, verb = what
    if await _until_back(client, case, BACK_S):
        return True
    report.notes.append(f"no answer within {BACK_S:.0f} s after {verb} of {name}")
    if settings.restarts:
        await peer.start_anew(name)
        if await _until_back(client, case, READY_S):
            return True
    report.notes.append("no answer any more: run ended")
    return False


@asynccontextmanager
async def _peer(settings: PeerSettings) -> AsyncGenerator[Peer, None]:
    peer = Peer(settings)
    try:
        yield peer
    finally:
        await peer.close()


async def _undisturbed(settings: PeerSettings, client: SseClient) -> dict[str, tuple[Case, Answer]]:
    """Cases with an answer each; ``is_counted`` those that are never answered twice the same."""
    made = make_cases(settings.seed, _CONTEXT_LENGTH, settings.num_tokens)
    found: dict[str, tuple[Case, Answer]] = {}
    for case in (case for case in made if case.name in _USUAL_CASES):
        first, second = [await _ask(client, case, settings.timeout_s) for _ in range(2)]
        if first.is_complete and second.is_complete:
            if compare(first, second):
                first = as_counts(first)
            found[case.name] = (case, first)
    if not found:
        raise PeerFailed("no request was answered")
    return found


def as_counts(answer: Answer) -> Answer:
    """An answer of which only the number of token events counts: each becomes one character."""
    counted = Answer(answer.num_choices, request_id=answer.request_id, usage=answer.usage)
    counted.num_events = answer.num_events
    counted.texts = ["." * count for count in answer.num_events]
    counted.reasons = answer.reasons
    counted.event_s, counted.error, counted.message = answer.event_s, answer.error, answer.message
    counted.is_complete, counted.is_counted = answer.is_complete, True
    return counted


async def _ask(client: SseClient, case: Case, timeout_s: float) -> Answer:
    answer = Answer(case.sampling.n)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s + _LATE_S):
            await client.run(case, case.name, answer)
    return answer


async def _round(
    settings: PeerSettings,
    client: SseClient,
    peer: Peer,
    cases: dict[str, tuple[Case, Answer]],
    rng: random.Random,
    what: tuple[str, str],
) -> Tally:
    """Load, then a blow at a random time while the streams run, then every stream's judgement."""
    chosen = [rng.choice(list(cases)) for _ in range(settings.num_streams)]
    answers = [Answer(cases[name][0].sampling.n) for name in chosen]

    async def read(name: str, answer: Answer, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.timeout_s + _LATE_S):
                await client.run(cases[name][0], name, answer)

    async with asyncio.TaskGroup() as tasks:
        for name, answer in zip(chosen, answers, strict=True):
            tasks.create_task(read(name, answer, rng.uniform(0, _STAGGER_S)))
        await _until_half_way(answers, sum(sum(cases[name][1].num_events) for name in chosen), rng)
        running = [answer for answer in answers if not answer.has_ended]
        struck_s = time.monotonic()
        peer.strike(*what)
        await peer.mend(*what)
    tally = Tally(faults=1)
    for name, answer in zip(chosen, answers, strict=True):
        expected = cases[name][1]
        tally.judge(expected, as_counts(answer) if expected.is_counted else answer)
    recovered_s = [answer.recovery_s(struck_s) for answer in running if answer.is_complete]
    tally.recoveries_s = [value for value in recovered_s if value is not None]
    return tally


async def _until_half_way(answers: list[Answer], num_tokens: int, rng: random.Random) -> None:
    """Until between a tenth and two thirds of all tokens came."""
    least = rng.uniform(*_HALF_WAY) * num_tokens

    def is_there() -> bool:
        return sum(sum(answer.num_events) for answer in answers) >= least or all(
            answer.has_ended for answer in answers
        )

    await until(is_there, READY_S)


async def _until_back(client: SseClient, case: Case, timeout_s: float) -> bool:
    """Wait until it answers again."""
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        if (await _ask(client, case, timeout_s / 2)).is_complete:
            return True
        await asyncio.sleep(_STAGGER_S)
    return False


def main(
    url: Annotated[str, typer.Option(help="http://host:port")],
    model: Annotated[str, typer.Option(help="model to ask for")],
    pid: Annotated[list[str], typer.Option(help="NAME=PID, may be repeated")],
    verb: Annotated[list[str], typer.Option(help="kill, freeze, term; may be repeated")],
    restart: Annotated[bool, typer.Option(help="start again what was ended")] = False,
    count: Annotated[int, typer.Option(help="faults in all")] = 4,
    streams: Annotated[int, typer.Option(help="requests at a time")] = 10,
    tokens: Annotated[int, typer.Option(help="length of an answer")] = 60,
    freeze: Annotated[float, typer.Option(help="seconds")] = 10.0,
    timeout: Annotated[float, typer.Option(help="seconds for one request")] = 60.0,
    settle: Annotated[float, typer.Option(help="seconds for what was restarted to serve")] = 15.0,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Kill, freeze or end processes of a server while it streams, and check every stream."""
    console = Console(width=150, highlight=False)
    settings = PeerSettings(
        url=url,
        model=model,
        pids={name: int(number) for name, number in map(_pair, pid)},
        verbs=tuple(verb),
        count=count,
        num_streams=streams,
        num_tokens=tokens,
        freeze_s=freeze,
        timeout_s=timeout,
        seed=seed,
        restarts=restart,
        settle_s=settle,
    )
    report = asyncio.run(run_peer_chaos(settings, console))
    console.print(report.table())
    print(msgspec.json.encode(report.content()).decode())


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE")
    return name, value


if __name__ == "__main__":
    typer.run(main)
