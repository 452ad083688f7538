"""How long a worker's steps take, as fitted to measurements."""

from __future__ import annotations

import msgspec

from schemas.codec import Message


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of an engine's step times, in milliseconds.

    A step that prefills takes ``A + B * sum(p) + C * sum(p**2)``, p being the prompt lengths; one
    that decodes takes ``A + B * sum(context) + C * batch``; one that does both, both. What they
    mean for a prompt of which a part is cached is in ``pipeline/cost_model.py``. None is negative.
    A worker that does one of the two alone guesses the other from it.
    """

    prefill_base_ms: float
    prefill_token_ms: float
    prefill_square_ms: float
    decode_base_ms: float
    decode_context_ms: float
    decode_sequence_ms: float


class WorkerProfile(Message, frozen=True, kw_only=True, tag="worker-profile/1"):
    """The costs of one kind of worker, in the bucket ``mesh_models``.

    A worker finds its own by name: the one it is told, else ``<model@rev>.<engine>.<device>``.
    """

    name: str
    costs: StepCosts
    hardware: str = ""  # for people: "H100 80GB SXM, 1 of 8"
    engine: str = ""  # as in a beat: "native q4"
    served: str = ""  # <model@rev>; "": a published figure, for simulation
    kv_tokens: int = 0  # how many tokens its KV cache holds; 0: not said
    kv_token_bytes: int = 0  # bytes of keys and values of one token; 0: not said
    prefill_error: float = 0.0  # mean relative error of the fit; 0.1 is 10 %
    decode_error: float = 0.0
    source: str = ""  # where the figures are from
    measured_unix_s: int = 0
