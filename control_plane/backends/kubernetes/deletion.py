"""A slot's pod is deleted as it was known, or looked at again: never a namesake, never one of which nobody knows how it
is now.

Limits: the last try is by uid alone, since a pod that starts or ends changes all the time.
"""

from __future__ import annotations

from typing import Final

from control_plane.backends.kubernetes.api import PODS, Api, ApiRefused, Object
from control_plane.backends.kubernetes.watching import name_of, uid_of, version_of

TRIES: Final = 4


async def delete_pod(api: Api, pod: Object) -> int:
    """The calls that it took. Raises ApiError."""
    name, uid, calls = name_of(pod), uid_of(pod), 0
    while True:
        calls += 1
        try:
            await api.delete(PODS, name, uid=uid, version=version_of(pod) if calls < TRIES else "")
            return calls
        except ApiRefused as error:
            if error.status == 404:
                return calls
            if error.status != 409 or calls == TRIES:
                raise
        try:
            pod = await api.get(PODS, name)
        except ApiRefused as error:
            if error.status == 404:
                return calls
            raise
        if uid_of(pod) != uid:
            return calls
