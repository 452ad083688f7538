"""What one caller may do, and what it is charged for one HTTP request.

    enter     one request, one place among those open at once, tokens as far as the body says
    confirm   tokens, exactly: admission has counted the prompt
    end       tokens that were used instead of those that were reserved; the place is given back

``enter`` and ``confirm`` refuse what does not fit (429). What ``enter`` refuses costs nothing; what
``confirm`` refuses, after the mesh has worked for it, costs a request and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from pipeline.access.bucket import Bucket
from pipeline.access.budgets import Account, Budgets
from pipeline.access.charge import Charge
from pipeline.access.errors import OverLimit, RateLimited
from pipeline.access.headers import Header, rate_headers
from pipeline.access.key import ApiKey
from schemas.requests import Slo

_RETRY_S = 1.0  # when one of a key's open requests will end, nobody knows


class Permit:
    """That of callers who need no key: everything, uncounted."""

    tenant = ""
    key_name = ""
    is_counted = False  # whether charges matter

    def may_use(self, model: str) -> bool:
        """Whether requests for ``model`` are answered."""
        return True

    def priority_of(self, asked: int | None) -> int:
        """The priority that a request gets."""
        return asked or 0

    def slo_of(self, asked: Slo) -> Slo:
        """The times that a request is to be served in."""
        return asked

    def enter(self, charge: Charge) -> None:
        """Begin a request.

        Raises:
            RateLimited: too many requests or tokens in this minute, or requests at once.
        """

    def confirm(self, charge: Charge) -> None:
        """Charge ``charge`` instead of what :meth:`enter` was told.

        Raises:
            RateLimited: too many tokens.
        """

    def end(self, num_tokens: int | None) -> None:
        """End the request, which used ``num_tokens``, or all that was charged (None). Once: later
        calls change nothing, and so does one without :meth:`enter`."""

    def headers(self) -> Sequence[Header]:
        """What the answer says of the key's limits."""
        return ()


ANYONE = Permit()


class KeyPermit(Permit):
    """That of a key without limits."""

    def __init__(self, key: ApiKey) -> None:
        self._key = key
        self.tenant = key.tenant
        self.key_name = key.name

    def may_use(self, model: str) -> bool:
        """As the key says."""
        return self._key.may_use(model)

    def priority_of(self, asked: int | None) -> int:
        """As the key says."""
        return self._key.priority_of(asked)

    def slo_of(self, asked: Slo) -> Slo:
        """As the key says, where the request says nothing."""
        return asked if asked != Slo() else self._key.slo


class MeteredPermit(KeyPermit):
    """That of a key with limits."""

    is_counted = True

    def __init__(self, key: ApiKey, budgets: Budgets) -> None:
        super().__init__(key)
        self._budgets = budgets
        self._charged = 0  # tokens
        self._is_inside = False
        self._has_looked = False
        self._requests = Bucket()  # as they were last seen, for the headers
        self._tokens = Bucket()

    def enter(self, charge: Charge) -> None:
        """All of it is charged, or nothing."""
        with self._budgets.account(self._key.digest) as account:
            self._look(account)
            self._check(account, charge)
            if self._key.requests_per_minute is not None:
                account.requests.charge(1)
            self._charge(account, self._tokens_of(charge))
            account.enter()
            self._is_inside = True

    def confirm(self, charge: Charge) -> None:
        """The difference is charged or given back; when it does not fit, all is given back."""
        if self._key.tokens_per_minute is None:
            return
        with self._budgets.account(self._key.digest) as account:
            self._look(account)
            before, self._charged = self._charged, 0
            account.tokens.charge(-before)
            self._check_tokens(account, charge)
            self._charge(account, self._tokens_of(charge))

    def end(self, num_tokens: int | None) -> None:
        """What was used beyond the charge is owed: it holds later requests back."""
        if not self._is_inside:
            return
        self._is_inside = False
        with self._budgets.account(self._key.digest) as account:
            self._look(account)
            if num_tokens is not None and self._key.tokens_per_minute is not None:
                self._charge(account, num_tokens - self._charged)
            account.leave()

    def headers(self) -> Sequence[Header]:
        """Limits, what remains, and when all of it is back, at this moment; nothing of a request
        that is not counted."""
        if not self._has_looked:
            return ()
        now_s, key = self._budgets.now_s(), self._key
        return [
            *rate_headers("requests", key.requests_per_minute, self._requests, now_s),
            *rate_headers("tokens", key.tokens_per_minute, self._tokens, now_s),
        ]

    # --- under the account ---------------------------------------------------------------------

    def _check(self, account: Account, charge: Charge) -> None:
        key = self._key
        rate, places = key.requests_per_minute, key.concurrent_requests
        if rate is not None and not account.requests.fits(1, rate):
            self._refuse("requests per minute", rate, 1, account.requests)
        if places is not None and account.num_open(places) >= places:
            raise RateLimited(
                f"API key {key.name} has {places} requests open, as many as it may at once",
                retry_after_s=_RETRY_S,
            )
        self._check_tokens(account, charge)

    def _check_tokens(self, account: Account, charge: Charge) -> None:
        limit = self._key.tokens_per_minute
        if limit is not None and not account.tokens.fits(charge.within(limit), limit):
            self._refuse("tokens per minute", limit, charge.within(limit), account.tokens)

    def _tokens_of(self, charge: Charge) -> int:
        limit = self._key.tokens_per_minute
        return 0 if limit is None else charge.within(limit)

    def _charge(self, account: Account, num_tokens: int) -> None:
        account.tokens.charge(num_tokens)
        self._charged += num_tokens

    def _look(self, account: Account) -> None:
        """Drain the levels to now. They are seen by the headers from here on, too."""
        now_s, key = self._budgets.now_s(), self._key
        if key.requests_per_minute is not None:
            account.requests.drain(key.requests_per_minute, now_s)
        if key.tokens_per_minute is not None:
            account.tokens.drain(key.tokens_per_minute, now_s)
        self._requests, self._tokens = account.requests, account.tokens
        self._has_looked = True

    def _refuse(self, what: str, limit: int, asked: int, bucket: Bucket) -> NoReturn:
        rule = f"API key {self._key.name} may use {limit} {what}"
        wait_s = bucket.wait_s(asked, limit)
        if wait_s is None:
            raise OverLimit(
                f"{rule}, this request needs {asked} at least: ask for less (max_tokens)"
            )
        left = bucket.remaining(limit)
        raise RateLimited(
            f"{rule}: {left} left, {asked} needed; try again in {wait_s:.3g} s",
            retry_after_s=wait_s,
        )
