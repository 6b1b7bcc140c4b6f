"""Objects made from checkpoints, let go with them: prepared forms and compiled kernels of models that nobody knows.

    forms/<name>/{head,body}          the name follows from identity, recipe and format
    artifacts/<identity>/<key>.bin

All of it can be made again, so a checkpoint that comes back costs time and nothing else. A group of objects goes only
when all of it is older than the grace: one that is just being stored is nobody's yet. Limits: a store's prefix belongs
to one installation; one run looks at so many objects and removes so many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from model_loader.forms.head import form_name
from model_loader.llama_layout import ITEM_BYTES, recipe_name
from model_loader.objects.protocol import ObjectInfo, ObjectStore

GRACE_S: Final = 86_400.0
MOST_LISTED: Final = 20_000
MOST_REMOVED: Final = 500
WITHIN_S: Final = 30.0
_FORM: Final = re.compile(r"forms/([0-9a-f]{64})/(?:head|body)")
_ARTIFACT: Final = re.compile(r"artifacts/(?:([0-9a-f]{64})/)?[0-9a-f]{64}\.bin")


@dataclass(frozen=True, slots=True)
class Swept:
    objects: int = 0
    nbytes: int = 0


def artifact_key(identity: str, name: str) -> str:
    return f"artifacts/{identity}/{name}.bin"


def form_names(identity: str) -> frozenset[str]:
    """Of every form a checkpoint has, by the recipes of today."""
    return frozenset(form_name(identity, recipe_name(dtype)) for dtype in ITEM_BYTES)


def forget_checkpoint(store: ObjectStore, identity: str) -> Swept:
    """Removes what was made of one checkpoint, and what slots elsewhere had it from. Raises `StoreError`; what it
    removed until then is gone."""
    going: list[ObjectInfo] = []
    for name in form_names(identity):
        going += store.list(f"forms/{name}/", within_s=WITHIN_S)
    for prefix in (f"artifacts/{identity}/", f"models/{identity}/"):
        going += store.list(prefix, within_s=WITHIN_S)
    return _remove(store, going)


def sweep_derived(
    store: ObjectStore,
    identities: Iterable[str],
    now_s: float,
    *,
    grace_s: float = GRACE_S,
    most_removed: int = MOST_REMOVED,
) -> Swept:
    """Removes what was made of checkpoints other than `identities`, or by recipes of the past. `now_s` is of the clock
    by which the store dates its objects."""
    known = frozenset(identities)
    wanted = frozenset[str]().union(*map(form_names, known))
    groups: dict[str, list[ObjectInfo]] = {}
    for prefix, pattern, kept in (("forms/", _FORM, wanted), ("artifacts/", _ARTIFACT, known)):
        for found in islice(store.list(prefix, within_s=WITHIN_S), MOST_LISTED):
            named = pattern.fullmatch(found.key)
            if named is not None and named[1] not in kept:
                groups.setdefault(found.key.rpartition("/")[0] if named[1] else found.key, []).append(found)
    going = [each for group in groups.values() if _age_s(group, now_s) > grace_s for each in group]
    return _remove(store, going[:most_removed])


def _age_s(group: Iterable[ObjectInfo], now_s: float) -> float:
    return min(now_s - each.modified_s for each in group)


def _remove(store: ObjectStore, going: Iterable[ObjectInfo]) -> Swept:
    """Heads first: a form without one is not there."""
    objects = nbytes = 0
    for each in sorted(going, key=lambda found: not found.key.endswith("/head")):
        store.delete(each.key, within_s=WITHIN_S)
        objects, nbytes = objects + 1, nbytes + each.nbytes
    return Swept(objects, nbytes)
