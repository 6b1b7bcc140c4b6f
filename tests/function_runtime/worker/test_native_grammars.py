"""A replica asked for answers of a given form: refusals come before the first token, and it outlives any grammar."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil

from function_runtime.protocol import Accepted, Failed, Finished, Grammar, GrammarKind, Tokens
from tests.function_runtime.worker.conftest import TinyModel
from tests.support.replica_client import AgentProcess, wait_for, work

PROMPT = tuple(range(10, 50))
CHAIN = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(4000)}
    | {"a4000": {"type": "null"}},
}


def test_a_replica_refuses_bad_grammars_survives_deadly_ones_and_leaves_no_child_behind(
    native_agent: AgentProcess, tiny_model: TinyModel, tmp_path: Path
) -> None:
    status = native_agent.ready(tiny_model.spec(tmp_path))
    link = native_agent.connect(status)
    for grammar, reason in (
        (Grammar(GrammarKind.REGEX, "(", "guided_regex"), "guided_regex"),
        (Grammar(GrammarKind.JSON_SCHEMA, json.dumps(CHAIN)), "nested too deeply"),
    ):
        request = link.submit(work(PROMPT, max_tokens=20, grammar=grammar, request_id=f"cmpl-{reason}"))
        outcome = link.outcome(request)
        assert isinstance(outcome, Failed) and (outcome.code, outcome.retry) == ("invalid_grammar", False)
        assert reason in outcome.message
        assert not link.tokens(request)
    good = Grammar(GrammarKind.REGEX, "[a-f]{5,9}!")
    request = link.submit(work(PROMPT, max_tokens=40, grammar=good))
    link.next(Accepted)
    link.next(Tokens)
    assert isinstance(link.outcome(request), Finished)
    assert re.fullmatch("[a-f]{5,9}!", "".join(event.text for _, event in link.tokens(request)))
    children = psutil.Process(status.pid).children()
    native_agent.end_replica(status.replica_id, grace_s=0)
    wait_for(lambda: not any(child.is_running() for child in children), what="the end of the replica's children")
