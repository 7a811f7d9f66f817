"""The error tree: who must act, and with which exit code a process ends."""

from __future__ import annotations

import pytest

from dips.core import errors
from dips.core.errors import DipsError, RefusalCode, Refused, RetryLater

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DipsError)]


def test_exit_codes_tell_the_kinds_apart() -> None:
    codes = {kind.__name__: kind.exit_code for kind in KINDS}
    assert len(set(codes.values())) == len(codes)
    assert codes == {
        "DipsError": 1,
        "ConfigError": 2,
        "Refused": 3,
        "RetryLater": 4,
        "RemoteProtocolError": 5,
        "FatalError": 6,
        "LocalProtocolError": 70,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_caught_as_one(kind: type[DipsError]) -> None:
    assert issubclass(kind, DipsError)
    assert 0 < kind.exit_code < 126


def test_a_refusal_carries_its_code_and_its_sentence() -> None:
    refused = Refused(RefusalCode.TOKENS, "the token count is -5: it must be positive", retry_after_s=2.5)
    assert str(refused) == refused.sentence == "the token count is -5: it must be positive"
    assert (refused.code, refused.retry_after_s) == (RefusalCode.TOKENS, 2.5)


def test_a_refusal_does_not_invite_a_retry_by_itself() -> None:
    assert Refused(RefusalCode.LAYOUT, "other").retry_after_s == 0
    assert RetryLater("not yet").retry_after_s > 0
