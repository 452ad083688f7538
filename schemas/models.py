"""What the registry (KV bucket ``mesh_models``) says of a model."""

from __future__ import annotations

from schemas.codec import Message


class ModelCard(Message, frozen=True, kw_only=True, tag="model-card/1"):
    """One model as clients name it, and the revision that serves it."""

    name: str
    revision: str
    served: str  # <model@rev>
    folder: str  # where tokenizer and weights lie, as the control process sees it
    architecture: str
    context_length: int
    vocab_size: int
    has_chat_template: bool
    created_unix_s: int
