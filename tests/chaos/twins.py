"""KV that must never be served to the function under test: of another tenant, dtype, revision.

For each, a twin function answers the same prompt; the packs it stores are copied out, with their records, while its
request still runs. Limits: the beginning of one answer each; the twins are gone when this returns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.client import Client, Endpoint
from function_runtime.protocol import KvChunk
from tests.chaos.load import COMPLETIONS, PROMPTS
from tests.chaos.site import Site

OTHERS = ("tenant", "dtype", "revision")
TENANT = "rival"


@dataclass(frozen=True, slots=True)
class TwinChunk:
    """A chunk of the same tokens that is another's, with the pack it lies in."""

    of: str
    prompt: int
    chunk: KvChunk
    pack: bytes


def collect_twins(
    place: Site, checkpoint: Path, other_revision: Path, engine_options: dict[str, Any], prompts: int
) -> list[TwinChunk]:
    found: list[TwinChunk] = []
    service = place.gateways[0]
    spec = {"scaling": {"keep_alive": 0}, "engine_options": engine_options}
    rival = service.call("POST", "/api/v1/keys", {"name": "rival", "role": "admin", "tenant": TENANT})["key"]
    for of, name, key, fields in (
        ("tenant", "twin-tenant", rival, {"model": f"file://{checkpoint}"}),
        ("dtype", "twin-dtype", service.key, {"model": f"file://{checkpoint}", "dtype": "bfloat16"}),
        ("revision", "twin-revision", service.key, {"model": f"file://{other_revision}"}),
    ):
        client = Client(Endpoint(service.url, key))
        path = f"/api/v1/functions/{name}"
        client.request("PUT", path, body={"name": name, **fields, **spec}, timeout_s=60)
        while client.request("GET", f"{path}/status").get("import", {}).get("state") != "ready":
            time.sleep(0.05)
        for prompt in range(prompts):
            found.append(_first_chunk(place, client, of, name, prompt))
        client.request("DELETE", path, timeout_s=60)
    service.wait_zero()
    return found


def _first_chunk(place: Site, client: Client, of: str, name: str, prompt: int) -> TwinChunk:
    """The chunk that begins at 0, taken while the request it belongs to goes on; then its client leaves."""
    body = {"model": name, "prompt": PROMPTS[prompt], "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
    stream = client.stream(COMPLETIONS, body)
    events = iter(stream)
    try:
        for _ in events:
            rows = place.books.rows("SELECT chunks FROM request_kv WHERE request_id = ?", (stream.request_id,))
            for chunk in (chunk for (chunks,) in rows for chunk in _decoded(chunks)):
                if chunk.start == 0 and (pack := place.objects.get(chunk.pack)) is not None:
                    return TwinChunk(of, prompt, chunk, pack)
    finally:
        events.close()  # type: ignore[attr-defined]
        if stream.request_id:
            client.cancel(COMPLETIONS, stream.request_id)
    raise RuntimeError(f"{name} stored no KV of its prompt")


def _decoded(chunks: bytes) -> list[KvChunk]:
    from control_plane.history import decode_chunks

    return decode_chunks(chunks)
