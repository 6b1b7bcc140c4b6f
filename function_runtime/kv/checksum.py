"""CRC32C of any buffer without copying it."""

from __future__ import annotations

import google_crc32c
import numpy as np


def crc32c(data: bytes | memoryview) -> int:
    # The library takes bytes and arrays, and no memoryviews.
    return int(google_crc32c.value(data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)))
