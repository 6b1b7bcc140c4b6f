"""What `helm test` runs: a function on the CPU is deployed, called at zero, answers, and is at zero again.

Over the HTTP API alone, with nothing but Python's own library. Each step has STOKER_TEST_STEP_S seconds and says what
it saw; exit status 1 and the reason if one does not hold. The function is deleted at the end, whatever happened.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid

URL = os.environ["STOKER_URL"].rstrip("/")
KEY = os.environ["STOKER_API_KEY"]
MODEL = os.environ["STOKER_TEST_MODEL"]
STEP_S = float(os.environ.get("STOKER_TEST_STEP_S", "600"))
PAUSE_S = 0.5
NAME = "helm-test-" + uuid.uuid4().hex[:8]


class Answer(Exception):
    """An answer that is an error: its status and what it says."""

    def __init__(self, status, text):
        super().__init__(f"HTTP {status}: {text[:500]}")
        self.status = status


def call(method, path, body=None, timeout_s=30.0):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        raise Answer(error.code, error.read().decode("utf-8", "replace")) from error


def until(what, look):
    """Looks until `look` returns something true; the last thing seen is told if time runs out."""
    deadline_s, seen = time.monotonic() + STEP_S, ""
    while time.monotonic() < deadline_s:
        try:
            found, seen = look()
            if found:
                return seen
        except (Answer, OSError) as error:
            seen = str(error)
        time.sleep(PAUSE_S)
    sys.exit(f"after {STEP_S:g} s {what} is not so; last seen: {seen}")


def ready():
    return True, call("GET", "/health/ready", timeout_s=5)["status"]


def status():
    return call("GET", f"/api/v1/functions/{NAME}/status")


def imported():
    found = status()["import"]
    if found["state"] == "failed":
        sys.exit(f"{MODEL} cannot be used: {found['error']}")
    return found["state"] == "ready", found["state"]


def at_zero():
    found = status()["status"]
    return found["replicas"] == 0, f"{found['replicas']} replicas"


def cycle():
    print("ready:", until("the service ready", ready))
    spec = {"name": NAME, "model": MODEL, "device": "cpu"}
    spec["scaling"] = {"min_replicas": 0, "max_replicas": 1, "keep_alive": 1}
    spec["timeouts"] = {"cold_start_s": STEP_S}
    call("POST", "/api/v1/functions", spec)
    until("its model imported", imported)
    print("deployed at zero:", until("the new function at zero", at_zero))
    begun_s = time.monotonic()
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    answer = call("POST", "/v1/chat/completions", body, timeout_s=STEP_S)
    tokens = answer["usage"]["completion_tokens"]
    print(f"woken by a call: {tokens} tokens after {time.monotonic() - begun_s:.2f} s")
    if tokens < 1:
        sys.exit(f"the call was answered without a token: {answer}")
    print("and at zero again:", until("the function at zero again", at_zero))


try:
    cycle()
finally:
    try:
        call("DELETE", f"/api/v1/functions/{NAME}")
    except (Answer, OSError) as error:
        print(f"the function {NAME} could not be deleted: {error}", file=sys.stderr)
