"""Say in words why a request to the archive failed, without what the service's own text gives away."""

from __future__ import annotations

import re
from typing import NamedTuple

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

REFUSALS = (PermissionDeniedError, UnauthenticatedError)
NO_BUCKET = "NoSuchBucket"
CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")


class Cause(NamedTuple):
    """A way in which requests to S3 fail.

    Attributes:
        sign: what the text of the error has then.
        text: what happened.
        mend: what an operator can do about it.
    """

    sign: str
    text: str
    mend: str


CAUSES = (
    Cause(NO_BUCKET, "there is no such bucket", "create it, or correct `handoffs.archive`"),
    Cause(
        "169.254.169.254",
        "there are no credentials: no key file, no variables, and no role that answers",
        "set `handoffs.archive_key_file`, or the AWS_* variables, or give the machine a role",
    ),
    Cause("InvalidAccessKeyId", "the service does not know the access key", "correct the access key's id"),
    Cause(
        "SignatureDoesNotMatch",
        "the access key's secret is wrong",
        "correct the access key's secret, in `handoffs.archive_key_file` or AWS_SECRET_ACCESS_KEY",
    ),
    Cause(
        "RequestTimeTooSkewed",
        "this machine's clock is not the service's",
        "set this machine's clock (NTP)",
    ),
    Cause("ExpiredToken", "the session token has expired", "renew the credentials"),
    Cause(
        "AuthorizationHeaderMalformed", "the bucket is in another region", "correct `handoffs.archive_region`"
    ),
    Cause("PermanentRedirect", "the bucket is in another region", "correct `handoffs.archive_region`"),
    Cause("QuotaExceeded", "the bucket's quota is used up", "raise the quota, or let handoffs live shorter"),
    Cause("StorageFull", "the service has no room", "give it more, or let handoffs live shorter"),
    Cause("SlowDown", "the service asks for fewer requests", "wait, or lower `handoffs.archive_rate`"),
    Cause(
        "AccessDenied",
        "these credentials are not allowed to",
        "allow it: docs/how-to/archive.md has the policy",
    ),
    Cause(
        "invalid peer certificate",
        "its certificate is not trusted",
        "name its authority in `handoffs.archive_ca_file`",
    ),
    Cause("dns error", "the name of its host is unknown", "correct `handoffs.archive_endpoint`"),
    Cause(
        "kind: Timeout",
        "it does not answer in time",
        "look at the service, or raise `handoffs.archive_timeout_s`",
    ),
    Cause(
        "error sending request",
        "it cannot be reached",
        "start it, or correct `handoffs.archive_endpoint` and what is between",
    ),
)
UNKNOWN = "look at the service's own log"


def code_of(error: BaseException) -> str | None:
    """Return what S3 calls the reason, such as `AccessDenied`."""
    found = CODE.search(str(error))
    return found[1] if found is not None else None


def is_no_bucket(error: BaseException) -> bool:
    """Return whether the bucket is missing, and not only the object."""
    return code_of(error) == NO_BUCKET


def kind_of(error: BaseException) -> str:
    """Return the kind of failure that is counted."""
    if isinstance(error, REFUSALS):
        return "refused"
    return "timeout" if "kind: Timeout" in str(error) else "error"  # obstore has no exception of its own


def cause_of(error: BaseException) -> Cause | None:
    """Return the known cause of a failure."""
    text, code = str(error), code_of(error)
    for cause in CAUSES:
        if cause.sign == code or (code is None and cause.sign in text):
            return cause
    return None


def reason_of(error: BaseException) -> str:
    """Return why a request failed, for a log: no host, no object."""
    code, cause = code_of(error), cause_of(error)
    refused = "the service refuses these credentials" if isinstance(error, REFUSALS) else None
    text = refused or (cause.text if cause is not None else type(error).__name__)
    return f"{text} ({code or type(error).__name__})"


def mend_of(error: BaseException) -> str:
    """Return what an operator can do about a failure."""
    cause = cause_of(error)
    return cause.mend if cause is not None else UNKNOWN
