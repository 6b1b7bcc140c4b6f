"""What an operator says of durable KV by the environment."""

from __future__ import annotations

from function_runtime.kv.settings import KvReplicaSettings


def test_stored_kv_is_weighed_unless_it_is_to_be_loaded_always() -> None:
    assert not KvReplicaSettings.of("file:///x", {}).loads_always
    assert not KvReplicaSettings.of("file:///x", {"STOKER_KV_LOAD": "measured"}).loads_always
    assert KvReplicaSettings.of("file:///x", {"STOKER_KV_LOAD": "always"}).loads_always
