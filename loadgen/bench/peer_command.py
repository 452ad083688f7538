"""Another engine's speed, by a command that measures it and prints JSON."""

from __future__ import annotations

import shlex
import statistics
import subprocess
from collections.abc import Sequence

import msgspec

from schemas.errors import ConfigError, MeshError

TIMEOUT_S = 1800.0  # the command may have to build what it measures
_SHOWN_CHARACTERS = 300


class PeerSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of one stream."""

    prefill_tok_s: float
    decode_tok_s: float


class PeerFailed(MeshError):
    """The command ended with an error, or printed something else."""

    code = "peer_failed"


def run_peer(command: str) -> PeerSpeed:
    """Run ``command``, without a shell; the last line of what it prints is a JSON object with the
    fields of :class:`PeerSpeed`. Its stderr goes to ours.

    Raises:
        ConfigError: there is no such program, or the command can't be split into words.
        PeerFailed: as its name says; the message ends with what was printed.
    """
    try:
        words = shlex.split(command)
        done = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{command!r} can't be run: {error}", param="peer") from error
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"{command!r} did not end within {TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise PeerFailed(f"{command!r} ended with {done.returncode}: {_end(done.stdout)}")
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        speed = msgspec.json.decode(last, type=PeerSpeed)
    except msgspec.DecodeError as error:
        raise PeerFailed(f"{command!r} printed no speeds ({error}): {_end(last)}") from error
    if min(speed.prefill_tok_s, speed.decode_tok_s) <= 0:
        raise PeerFailed(f"{command!r} printed a speed of zero: {_end(last)}")
    return speed


def median_speed(speeds: Sequence[PeerSpeed]) -> PeerSpeed:
    """The median of each figure; of one at least."""
    return PeerSpeed(
        prefill_tok_s=statistics.median(one.prefill_tok_s for one in speeds),
        decode_tok_s=statistics.median(one.decode_tok_s for one in speeds),
    )


def _end(text: str) -> str:
    return text.strip()[-_SHOWN_CHARACTERS:]
