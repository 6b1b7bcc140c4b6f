"""Slots that somebody else started: found by address, commanded by a derived token, gone by refusal or long silence."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from control_plane.backends import local
from control_plane.backends.attached import AttachedHome
from control_plane.backends.base import SlotRefused, SlotUnavailable
from control_plane.backends.local import LocalBackend
from control_plane.settings import AgentPlace, Settings, SlotRange, SlotSettings
from function_runtime.protocol import agent_token


def home_of(folder: Path, port: int, secret: bytes = b"a secret of many bytes\n") -> AttachedHome:
    path = folder / "secret"
    path.write_bytes(secret)
    return AttachedHome(AgentPlace("far-1", "127.0.0.1", port), path, orphan_s=20.0)


async def test_its_token_follows_from_the_secret_and_its_name(tmp_path: Path) -> None:
    home = home_of(tmp_path, 7070)
    info = await home.find()
    assert info.token == agent_token(b"a secret of many bytes", "far-1")
    assert (info.slot_id, info.host, info.port) == ("far-1", "127.0.0.1", 7070)
    assert not home.shares_files
    (tmp_path / "secret").unlink()
    with pytest.raises(SlotUnavailable, match="secret"):
        await home.find()


async def test_a_refused_connection_is_its_end_and_silence_only_when_it_has_lasted(tmp_path: Path) -> None:
    # A port that takes connections into its backlog and never answers stands for a machine that hangs.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        home = home_of(tmp_path, listener.getsockname()[1])
        await home.find()
        assert not await home.is_gone()
        home._heard_s -= 31.0
        assert await home.is_gone(), "an agent that nobody reads has ended after so long"
        home.heard()
        assert not await home.is_gone()
    assert await home.is_gone()


async def test_attached_slots_count_and_are_not_given_back_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LocalHome", lambda *_: pytest.fail("a slot of this machine was begun"))
    agents = AgentPlace.parse_list("far-1=127.0.0.1:1,far-2=127.0.0.1:2")
    slot = SlotSettings(range=SlotRange(0, 0), agents=agents, agent_secret_file=str(tmp_path / "secret"))
    backend = LocalBackend(Settings(data_dir=tmp_path, slot=slot))
    assert backend.slot_ids == ("far-1", "far-2") and backend.any_elsewhere
    (slots,) = backend.classes
    assert (slots.least, slots.most, slots.elastic) == (2, 2, False)
    with pytest.raises(SlotRefused, match="not given back from here"):
        await backend.remove_slot("far-1")
    await backend.close(end_agents=True, grace_s=0)
