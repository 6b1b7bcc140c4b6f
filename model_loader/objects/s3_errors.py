"""What an S3 answer or a failure of boto3 means for us: one table from codes to errors, with what to do about each.

Limits: a HEAD has no body, so that its 403 and 404 say less than those of other requests.
"""

from __future__ import annotations

from typing import Any, Final

from model_loader.errors import LoaderError, MissingObject, ShortObject, StoreError, StoreProblem, StoreRefused
from model_loader.errors import StoreUnavailable as Unavailable
from model_loader.objects.location import S3Location

_UNKNOWN_KEY: Final = frozenset({"InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException"})
_WRONG_SECRET: Final = frozenset({"SignatureDoesNotMatch", "InvalidToken", "AuthorizationQueryParametersError"})
_EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_CLOCK: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_FORBIDDEN: Final = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "403", "401"})
_REGION: Final = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
)
_FULL: Final = frozenset({"XMinioStorageFull", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "507"})
_LATER: Final = frozenset(
    {
        "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "InternalError",
        "ServiceUnavailable", "RequestTimeout", "TemporaryRedirect", "OperationAborted", "BadDigest", "IncompleteBody",
        "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "429", "307",
    }
)  # fmt: skip
_RIGHTS: Final = {
    "get": "s3:GetObject", "head": "s3:GetObject", "put": "s3:PutObject (and s3:AbortMultipartUpload)",
    "list": "s3:ListBucket", "delete": "s3:DeleteObject",
}  # fmt: skip


def from_answer(response: dict[str, Any], kind: str, what: str, place: S3Location) -> LoaderError:
    """The error that a ClientError's `response` stands for; `what` names the object, or is empty for the bucket."""
    said = response.get("Error", {})
    code, text = str(said.get("Code", "")), str(said.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    bucket, at = f"bucket {place.bucket}", f" at {place.endpoint}" if place.endpoint else ""
    if code == "NoSuchBucket" or (code == "404" and not what):
        return StoreRefused(
            f"there is no {bucket}{at}: create it, or correct the store's URI", StoreProblem.MISSING_BUCKET
        )
    if code in ("NoSuchKey", "404") or (status == 404 and what and code != "NoSuchUpload"):
        return MissingObject(f"there is no object {what}")
    if code in ("InvalidRange", "416"):
        return ShortObject(f"object {what} is short: it ends before the bytes that were asked for")
    if code in _UNKNOWN_KEY:
        return StoreRefused(
            f"the access key is not known to the object store of {bucket}{at}: correct AWS_ACCESS_KEY_ID (or the "
            "profile that boto3 takes it from)", StoreProblem.WRONG_CREDENTIALS,
        )  # fmt: skip
    if code in _WRONG_SECRET:
        return StoreRefused(
            f"the secret key does not belong to the access key, says the object store of {bucket}{at}: correct "
            "AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN)", StoreProblem.WRONG_CREDENTIALS,
        )  # fmt: skip
    if code in _EXPIRED:
        return StoreRefused(
            f"the credentials for {bucket}{at} have expired: renew them (AWS_SESSION_TOKEN and its keys, or the "
            "login they come from)", StoreProblem.EXPIRED_CREDENTIALS,
        )  # fmt: skip
    if code in _CLOCK:
        return StoreRefused(
            f"this machine's clock differs too much from that of the object store of {bucket}{at}: set it (NTP)",
            StoreProblem.WRONG_CREDENTIALS,
        )
    if code in _REGION or status == 301:
        return wrong_region(place, region_in(response))
    if code in _FORBIDDEN or status in (401, 403):
        return StoreRefused(
            f"these credentials may not {kind} in {bucket}{at}: grant {_RIGHTS.get(kind, kind)}, or use others",
            StoreProblem.NO_PERMISSION,
        )
    if code in _FULL or status == 507:
        # Not unavailable: what is there can be read all the same.
        return StoreRefused(
            f"the object store of {bucket}{at} is full: free some, or raise its quota", StoreProblem.FULL
        )
    if code in _LATER or status >= 500:
        return Unavailable(f"the object store of {bucket}{at} answered {status} {code}: {text}".rstrip(": "))
    return StoreError(f"the object store of {bucket}{at} refused to {kind} {what}: {status} {code} {text}".rstrip())


def region_in(response: dict[str, Any]) -> str:
    """The region that an answer names, if it does."""
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(response.get("Error", {}).get("Region", "") or headers.get("x-amz-bucket-region", ""))


def wrong_region(place: S3Location, right: str) -> StoreRefused:
    named = f"region {place.region}" if place.region else "the default region"
    do = f"give region={right}" if right else "give the bucket's region as region=..."
    lies = f"lies in {right}, not in {named}" if right else f"does not lie in {named}"
    return StoreRefused(f"bucket {place.bucket} {lies}: {do} in the store's URI", StoreProblem.WRONG_REGION)


def from_boto(error: Exception, place: S3Location) -> LoaderError:
    """The error that a failure before any answer stands for: credentials, mostly."""
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ConfigNotFound"):
        return StoreRefused(
            f"there are no credentials for bucket {place.bucket} ({error}): set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE", StoreProblem.WRONG_CREDENTIALS,
        )  # fmt: skip
    if name == "RuntimeError" and "still expired" in str(error):
        # What boto3 raises when what it renews its credentials from has expired as well.
        return StoreRefused(
            f"the credentials for bucket {place.bucket} have expired, and so has what they are renewed from: log in "
            "again, or correct the profile", StoreProblem.EXPIRED_CREDENTIALS,
        )  # fmt: skip
    if name in ("UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError", "LoginRefreshRequired"):
        return StoreRefused(
            f"the login for bucket {place.bucket} has expired ({error}): log in again", StoreProblem.EXPIRED_CREDENTIALS
        )
    if name in ("CredentialRetrievalError", "MetadataRetrievalError", "HTTPClientError", "ConnectionError"):
        return Unavailable(f"credentials for bucket {place.bucket} cannot be had now: {error}")
    return StoreError(f"the request for bucket {place.bucket} could not be made: {name}: {error}")
