"""How far logits are from those of transformers in float32, on a text that people write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

MAX_TOKENS = 128

_TEXT = """<|im_start|>user
Why do bridges have gaps between their parts, and what would happen without them?<|im_end|>
<|im_start|>assistant
Steel and concrete grow longer when they are warm. A bridge of one hundred metres is about four
centimetres longer on a hot day than on a cold one. The gaps, which engineers call expansion
joints, leave room for that. Without them the parts would push against each other until something
bends or breaks: usually the road first, then the bearings on which the bridge rests.<|im_end|>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Over all positions of a text: the mean divergence KL(expected || got) in nats, and the share
    of positions at which both find the same token likeliest."""

    kl_mean: float
    argmax_agree: float
    num_positions: int


def chat_token_ids(folder: Path) -> list[int]:
    """The beginning of a chat as the model's tokenizer reads it, at most ``MAX_TOKENS`` long."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(tokenizer.encode(_TEXT).ids[:MAX_TOKENS])


def compare(expected: Tensor, got: Iterable[Tensor]) -> Fidelity:
    """Compare logits position by position.

    Args:
        expected: [n, vocab_size] float32.
        got: n rows, [vocab_size] float32.
    """
    divergences: list[float] = []
    num_equal = 0
    for one, other in zip(expected, got, strict=True):
        log_p, log_q = one.double().log_softmax(-1), other.double().log_softmax(-1)
        divergences.append(float((log_p.exp() * (log_p - log_q)).sum()))
        num_equal += int(one.argmax()) == int(other.argmax())
    num = len(divergences)
    return Fidelity(kl_mean=sum(divergences) / num, argmax_agree=num_equal / num, num_positions=num)
