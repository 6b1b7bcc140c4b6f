"""Errors of the slot.

SlotError                what went wrong, its code and whether a retry elsewhere may help
  SpecError              the replica's spec cannot be carried out here (never retried)
  LoadError              a worker could not become ready
  EngineFault            an engine refused a request, or could not carry it on
  PoolEntryUnknown       the warm pool holds nothing under that key
  PoolEntryInUse         a prepared form that cannot go now: somebody uses it, or it is still coming
  WorkerLost             a worker or the template is gone or does not answer
  KvError                a stored chunk that cannot be used; the reader turns it into a miss
"""

from __future__ import annotations


class SlotError(Exception):
    """Base of the tree. `code` is stable and machine-readable; `retry` says whether another attempt may do better."""

    def __init__(self, code: str, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry = retry


class SpecError(SlotError):
    def __init__(self, message: str, code: str = "invalid_replica_spec") -> None:
        super().__init__(code, message, retry=False)


class LoadError(SlotError):
    pass


class EngineFault(SlotError):
    @classmethod
    def of(cls, error: Exception) -> EngineFault:
        """What a request is told that was there when the engine broke."""
        if isinstance(error, EngineFault):
            return error
        return cls("engine_failed", f"the engine failed: {error}", retry=True)


class PoolEntryUnknown(SlotError):
    def __init__(self, message: str) -> None:
        super().__init__("pool_entry_unknown", message, retry=False)


class PoolEntryInUse(SlotError):
    def __init__(self, message: str) -> None:
        super().__init__("pool_entry_in_use", message, retry=True)


class WorkerLost(SlotError):
    def __init__(self, message: str) -> None:
        super().__init__("worker_lost", message, retry=True)


class KvError(SlotError):
    def __init__(self, message: str) -> None:
        super().__init__("kv_unusable", message, retry=False)
