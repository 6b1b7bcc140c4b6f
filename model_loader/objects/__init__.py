"""Object stores: named byte strings that appear whole or not at all, in a directory or behind S3.

    protocol    what every store does         resilience  retries, budget, deadline, circuit breaker
    directory   files of one machine          stats       what was asked and moved, for the bill and the metrics
    s3          buckets, by boto3             location    which store a URI names
    http        the directory of a control plane, for slots elsewhere

Limits: S3 needs the extra `s3` (boto3), imported when the first S3 store is opened and not before.
"""

from model_loader.objects.directory import DirectoryStore
from model_loader.objects.location import open_store
from model_loader.objects.protocol import Buffer, ObjectInfo, ObjectStore, check_key
from model_loader.objects.stats import StoreStats, StoreUse

__all__ = [
    "Buffer",
    "DirectoryStore",
    "ObjectInfo",
    "ObjectStore",
    "StoreStats",
    "StoreUse",
    "check_key",
    "open_store",
]
