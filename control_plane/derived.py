"""What the object store keeps that is made from models (prepared forms, compiled kernels): removed with its model, and
swept now and then where its model is known no more.

A model is known while the models directory has it or a function's revision in force is of it. Limits: the sweep is the
leading gateway's; a models directory that cannot be read means that nothing is swept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from control_plane.functions import FunctionStore

if TYPE_CHECKING:
    from model_loader.forms.sweeping import Swept
    from model_loader.objects import ObjectStore

logger = logging.getLogger(__name__)


class DerivedObjects:
    def __init__(
        self,
        opened: Callable[[], ObjectStore],
        models_dir: Path,
        functions: FunctionStore,
        pause_s: float,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opened = opened
        self._models_dir = models_dir
        self._functions = functions
        self._pause_s = pause_s
        self._clock_s = clock_s
        self._looked_s = clock_s()

    async def sweep(self) -> Swept | None:
        """None: it is not time yet, or nobody can say what is known."""
        if self._clock_s() - self._looked_s < self._pause_s:
            return None
        self._looked_s = self._clock_s()
        await self._functions.refresh()
        used = {each.current.identity for each in self._functions.list(None)}
        return await asyncio.to_thread(self._sweep, {identity for identity in used if identity})

    async def forget(self, identity: str) -> Swept:
        """Raises `StoreError`."""
        from model_loader.forms.sweeping import forget_checkpoint

        return await asyncio.to_thread(lambda: forget_checkpoint(self._opened(), identity))

    def _sweep(self, used: set[str]) -> Swept | None:
        from model_loader.forms.sweeping import sweep_derived

        try:
            # Every folder counts, whatever is the matter with its manifest.
            known = used | set(os.listdir(self._models_dir))
        except OSError as error:
            logger.warning("event=derived_not_swept error=%s", error)
            return None
        swept = sweep_derived(self._opened(), known, time.time())
        if swept.objects:
            logger.info("event=derived_swept objects=%d bytes=%d", swept.objects, swept.nbytes)
        return swept
