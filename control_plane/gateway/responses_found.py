"""Finding a response again by its id: of the caller's tenant, and with everything that is needed to show it.

Limits: one that was not to be stored, or whose log is gone, is not there for anybody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from control_plane.context import AppContext
from control_plane.errors import Elsewhere, InvalidRequest, NotFound
from control_plane.gateway.acceptance import as_logged, find
from control_plane.gateway.access import authenticate
from control_plane.gateway.internal import FORWARDED_FOR
from control_plane.gateway.reading import Answer
from control_plane.gateway.responses_body import InputItem
from control_plane.gateway.responses_object import ResponseView
from control_plane.live_request import LiveRequest
from control_plane.records import RequestState

_ID: Final = re.compile(r"resp_[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True)
class Found:
    live: LiveRequest | None
    answer: Answer
    completed_at: int | None = None


def missing(response_id: str) -> NotFound:
    return NotFound(f"there is no response {response_id[:80]}", param="id")


async def locate(context: AppContext, request: web.Request) -> Found:
    tenant = authenticate(context, request).tenant
    forwarded = FORWARDED_FOR in request.headers  # by the gateway that the first reader asked
    found = await lookup(context, request.match_info["id"], tenant, unstored=forwarded)
    request["request_id"] = found.answer.head.request_id
    return found


async def lookup(context: AppContext, response_id: str, tenant: str, *, unstored: bool = False) -> Found:
    """Raises `NotFound`. `unstored`: also what is for its first reader only."""
    if _ID.match(response_id) is None:
        raise missing(response_id)
    record = await context.journal.get(response_id, tenant)
    if record is None:
        raise missing(response_id)
    if record.state.ended and not record.damaged and (not record.params or record.durability == "off"):
        raise missing(response_id)
    live, answer = await find(context, record)
    if not (unstored or ResponseView.of(answer).traits.store):
        raise missing(response_id)
    finished_us = record.finished_us
    return Found(live, answer, None if finished_us is None else finished_us // 1_000_000)


async def previous(context: AppContext, response_id: str, tenant: str) -> tuple[InputItem, ...]:
    """The conversation up to and with an earlier response's answer."""
    try:
        answer = (await lookup(context, response_id, tenant)).answer
    except NotFound as error:
        raise InvalidRequest(error.message, param="previous_response_id", code="previous_response_not_found") from None
    except Elsewhere:
        # It is not this request that another gateway has. Its answer may be whole though its outcome is not written.
        answer = await as_logged(context, response_id, tenant)
        whole = bool(answer.log.events) and answer.log.events[-1].finish is not None
    else:
        whole = answer.log.end is not None and answer.log.end.state is RequestState.DONE
    if not whole:
        raise InvalidRequest(f"{response_id} has no whole answer (yet) to go on from", param="previous_response_id")
    said = InputItem("assistant", ("".join([event.text for event in answer.log.events]),))
    return (*ResponseView.of(answer).traits.items, said)
