"""What another bridge must know to write the same events again.

It travels with the request and comes back in its record (``reader_note``); no stage looks into it.
All else that events depend on lies in the token stream, in one order for everybody.
"""

from __future__ import annotations

import msgspec

from schemas.codec import Message, decode, encode
from schemas.errors import InvalidRequest, SchemaError


class ReaderNote(Message, frozen=True, kw_only=True, tag="bridge-note/1"):
    """How one HTTP request is answered."""

    endpoint: str  # the name of an ``Endpoint``
    model: str  # as the client called it
    created_unix_s: int
    num_prompts: int = 1
    include_usage: bool = False
    continuous_usage: bool = False

    def packed(self) -> bytes:
        """The bytes to travel: under 2 KiB, for a model's name is bounded."""
        return encode(self)

    def packed_for(self, num_prompts: int) -> bytes:
        """The same of an answer to so many prompts."""
        if num_prompts == self.num_prompts:
            return self.packed()
        return msgspec.structs.replace(self, num_prompts=num_prompts).packed()

    @classmethod
    def unpacked(cls, data: bytes) -> ReaderNote:
        """The note in a record.

        Raises:
            InvalidRequest: there is none that we can read: the request came over the bus, or
                through a bridge of another version.
        """
        try:
            return decode(data, cls)
        except SchemaError as error:
            raise InvalidRequest(
                "this request did not come through a bridge like this one: read it on the bus",
                param="request_id",
            ) from error
