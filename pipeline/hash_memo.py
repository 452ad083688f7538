"""Prefix hashes of prompts whose beginnings come again, without computing them again.

A prompt is taken in pieces of ``PIECE_BLOCKS`` blocks. What a piece hashes to depends on the hash
before it and on its tokens, so these two are the key:

    salt | piece 0  | piece 1  | piece 2 ...
           hashes     hashes
              \\______ is the parent of piece 1

A piece is remembered when more is asked for behind it. An index asks only behind what somebody
holds, so prompts that nobody knows leave nothing here. Of the piece where it stops asking, what was
hashed is kept for the next few prompts only: a request looks its own prompt up twice, when it is
judged and when it is placed, and hardly another one goes on in the same way.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import islice

import xxhash

from pipeline.prefix_hash import ID_BYTES, iter_prefix_hashes

PIECE_BLOCKS = 64
_STEP = 16  # blocks of an unknown piece that are hashed at once: it may be the last asked for
_MAX_PIECES = 2048  # of 16-token blocks: 2 million tokens, 15 MB
_MAX_TAILS = 128  # requests between their two looks

_Key = tuple[bytes, int, bytes]  # the hash before it, the block size, its tokens


class HashMemo:
    """The hashes of pieces that were asked for last.

    Args:
        max_pieces: how many are kept; each costs about 7 KB with 16-token blocks.
    """

    def __init__(self, max_pieces: int = _MAX_PIECES) -> None:
        self._max_pieces = max_pieces
        self._seed = secrets.randbits(64)  # so that nobody can make two pieces look alike
        self._pieces: dict[_Key, tuple[bytes, ...]] = {}  # oldest first
        self._tails: dict[_Key, tuple[bytes, ...]] = {}  # of those that are not whole; oldest first

    def __len__(self) -> int:
        return len(self._pieces)

    def runs(self, packed_ids: bytes, block_size: int, salt: bytes) -> Iterator[Sequence[bytes]]:
        """The hashes of :func:`iter_prefix_hashes` in runs, each made when it is asked for: the
        first one alone, then remembered pieces, or a few of what is not remembered.

        Cost: 0.9 µs per block that has to be hashed, 0.01 µs per block that is remembered.
        """
        size = PIECE_BLOCKS * block_size * ID_BYTES
        parent, view = salt, memoryview(packed_ids)
        for start in range(0, len(packed_ids), size):
            piece = view[start : start + size]
            key = (parent, block_size, xxhash.xxh3_128_digest(piece, self._seed))
            known = self._recall(key)
            if known:
                yield known
            if len(known) < PIECE_BLOCKS:
                rest = bytes(piece[len(known) * block_size * ID_BYTES :])
                hashes = iter(iter_prefix_hashes(rest, block_size, known[-1] if known else parent))
                take = _STEP if start or known else 1
                while run := tuple(islice(hashes, take)):
                    if start or known:
                        self._keep_tail(key, known + run)
                    known += run
                    yield run
                    take = _STEP
                if len(known) < PIECE_BLOCKS:
                    return  # the prompt ends here
                self._remember(key, known)
            parent = known[-1]

    def _recall(self, key: _Key) -> tuple[bytes, ...]:
        """What is known of a piece, from its first block on."""
        known = self._pieces.pop(key, None)
        if known is None:
            return self._tails.get(key, ())
        self._pieces[key] = known  # last used, last to go
        return known

    def _remember(self, key: _Key, hashes: tuple[bytes, ...]) -> None:
        self._tails.pop(key, None)
        if len(self._pieces) >= self._max_pieces:
            del self._pieces[next(iter(self._pieces))]
        self._pieces[key] = hashes

    def _keep_tail(self, key: _Key, hashes: tuple[bytes, ...]) -> None:
        self._tails.pop(key, None)
        if len(self._tails) >= _MAX_TAILS:
            del self._tails[next(iter(self._tails))]
        self._tails[key] = hashes
