"""What ``mesh profile`` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from schemas.profiles import WorkerProfile
    from workers.profiling import Measured

_HEADS = (
    "profile",
    "prefill\nms",
    "token\nµs",
    "1,000²\nms",
    "decode\nms",
    "1k ctx\nms",
    "seq\nms",
    "KV\ntokens",
)
_LEGEND = (
    "prefill: of a step, of each token, of 1,000² (squared prompt lengths); "
    "decode: of a step, of each 1,000 tokens of context, of each sequence"
)


def show(made: WorkerProfile, measured: Measured) -> None:
    """What was measured beside what is predicted, and the costs."""
    from rich.table import Table

    from pipeline.cost_fit import predicted_ms

    console = _console()
    table = Table("shape", box=None, pad_edge=False)
    for head in ("measured ms", "predicted ms", "off"):
        table.add_column(head, justify="right")
    for point, sample in measured.points.items():
        predicted = predicted_ms(made.costs, sample)
        off = f"{predicted / sample.ms - 1:+.0%}"
        table.add_row(point.text, f"{sample.ms:.2f}", f"{predicted:.2f}", off)
    console.print(f"{made.name}: {made.engine} on {made.hardware}")
    console.print(table)
    costs = made.costs
    console.print(
        f"prefill step: {costs.prefill_base_ms:.3f} ms, {costs.prefill_token_ms * 1e3:.2f} µs per "
        f"token, {costs.prefill_square_ms * 1e6:.3f} ms per 1,000² (squared prompt lengths)"
    )
    console.print(
        f"decode step: {costs.decode_base_ms:.3f} ms, {costs.decode_context_ms * 1e3:.3f} ms per "
        f"1,000 tokens of context, {costs.decode_sequence_ms:.3f} ms per sequence"
    )
    console.print(
        f"mean error: prefill {made.prefill_error:.1%}, decode {made.decode_error:.1%}; "
        f"{measured.num_steps} steps in {measured.seconds:.0f} s"
    )


def show_list(groups: Mapping[str, Mapping[str, WorkerProfile]]) -> None:
    """A table of profiles per group."""
    from rich.table import Table

    console = _console()
    for title, profiles in groups.items():
        if not profiles:
            console.print(f"{title}: none\n")
            continue
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column(_HEADS[0], overflow="fold")
        for head in _HEADS[1:]:
            table.add_column(head, justify="right", no_wrap=True)
        for name, one in profiles.items():
            costs = one.costs
            table.add_row(
                name,
                f"{costs.prefill_base_ms:.2f}",
                f"{costs.prefill_token_ms * 1e3:.1f}",
                f"{costs.prefill_square_ms * 1e6:.3f}",
                f"{costs.decode_base_ms:.2f}",
                f"{costs.decode_context_ms * 1e3:.3f}",
                f"{costs.decode_sequence_ms:.3f}",
                f"{one.kv_tokens:,}",
            )
        console.print(table, soft_wrap=False)
        console.print()
    console.print(_LEGEND)


def as_json(made: WorkerProfile, measured: Measured) -> dict[str, Any]:
    """The same as :func:`show`."""
    from pipeline.cost_fit import predicted_ms

    points = [
        {
            **point._asdict(),
            "measured_ms": round(sample.ms, 3),
            "predicted_ms": round(predicted_ms(made.costs, sample), 3),
        }
        for point, sample in measured.points.items()
    ]
    return {"profile": made, "points": points, "seconds": round(measured.seconds, 1)}


def print_json(value: Any) -> None:
    """One indented object."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, soft_wrap=True)
