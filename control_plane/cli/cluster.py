"""`stoker --context CTX ...`: a service on a cluster, reached as if it ran here.

kubectl, with the user's own rights, finds the Service of the release and the administrator's key, and forwards a port
of this machine to it for as long as the command runs; a forward that breaks is made again before the next connection,
so that streams are resumed over it. Limits: kubectl has to be there; one connection goes through one copy of the
control plane; a command that is killed outright leaves its kubectl behind.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from control_plane.cli.failure import CommandError
from control_plane.client import Endpoint
from control_plane.resumption import Unreachable

CONTEXT: Final = "STOKER_CONTEXT"
NAMESPACE: Final = "STOKER_CONTEXT_NAMESPACE"
RELEASE: Final = "STOKER_CONTEXT_RELEASE"
"""Variables, so that a shell can be set to a cluster once; the options of the same names go before them."""
KEY_SECRET: Final = "stoker.dev/admin-key-secret"
"""Annotation of the Service: which secret holds the administrator's key, in its field `admin-key`."""
ANSWER_WITHIN_S: Final = 30.0
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")


@dataclass(frozen=True, slots=True)
class Found:
    """A release's Service."""

    namespace: str
    name: str
    port: int
    key_secret: str


class Cluster:
    """`endpoint` is a locator: it is asked before every connection."""

    def __init__(self, context: str, namespace: str = "", release: str = "") -> None:
        self._context, self._namespace, self._release = context, namespace, release
        self._found: Found | None = None
        self._key = ""
        self._forward: subprocess.Popen[str] | None = None
        self._port = 0
        atexit.register(self.close)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Cluster | None:
        """None where no context is named."""
        context = environ.get(CONTEXT)
        return cls(context, environ.get(NAMESPACE, ""), environ.get(RELEASE, "")) if context else None

    def endpoint(self) -> Endpoint:
        if self._found is None:
            self._found = self._find()
            self._key = os.environ.get("STOKER_API_KEY") or self._admin_key(self._found)
        if self._forward is None or self._forward.poll() is not None:
            self._port = self._begin(self._found)
        return Endpoint(f"http://127.0.0.1:{self._port}", self._key)

    def close(self) -> None:
        if self._forward is not None:
            self._forward.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._forward.wait(5)
            self._forward = None

    # --- kubectl ---

    def _command(self, *arguments: str, namespace: str = "") -> list[str]:
        place = namespace or self._namespace
        return ["kubectl", "--context", self._context, *(["--namespace", place] if place else []), *arguments]

    def _ask(self, *arguments: str, namespace: str = "") -> Any:
        command = self._command(*arguments, "-o", "json", namespace=namespace)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_WITHIN_S, check=False)
        except FileNotFoundError as error:
            raise CommandError(
                "there is no kubectl on PATH, which --context needs", "install it, or give --url", code="no_kubectl"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise Unreachable(self._context, f"no answer within {ANSWER_WITHIN_S:g} s", connected=False) from error
        if done.returncode != 0:
            raise CommandError(
                f"kubectl says: {done.stderr.strip()}", f"look at: {' '.join(command)}", code="kubectl_failed"
            )
        return json.loads(done.stdout)

    def _find(self) -> Found:
        named = f",app.kubernetes.io/instance={self._release}" if self._release else ""
        # By what only our chart writes, whatever its objects are called.
        items = self._ask("get", "services", "-l", f"app.kubernetes.io/managed-by=Helm{named}")["items"]
        ours = [each for each in items if KEY_SECRET in (each["metadata"].get("annotations") or {})]
        where = f"context {self._context}, namespace {self._namespace or 'of the context'}"
        if not ours:
            raise CommandError(
                f"there is no Stoker in {where}", "name its namespace with --namespace", code="no_service"
            )
        if len(ours) > 1:
            releases = sorted(each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in ours)
            raise CommandError(
                f"there are several in {where}: {', '.join(releases)}", "name one with --release", code="ambiguous"
            )
        (service,) = ours
        metadata = service["metadata"]
        return Found(
            metadata["namespace"], metadata["name"], service["spec"]["ports"][0]["port"],
            metadata["annotations"][KEY_SECRET],
        )  # fmt: skip

    def _admin_key(self, found: Found) -> str:
        secret = self._ask("get", "secret", found.key_secret, namespace=found.namespace)
        try:
            return base64.b64decode(secret["data"]["admin-key"]).decode().strip()
        except KeyError as error:
            raise CommandError(
                f"the secret {found.key_secret} has no field admin-key", "set STOKER_API_KEY", code="no_key"
            ) from error

    def _begin(self, found: Found) -> int:
        """Forwards a free port of this machine; gives it."""
        target = (f"service/{found.name}", f":{found.port}", "--address", "127.0.0.1")
        self._forward = subprocess.Popen(
            self._command("port-forward", *target, namespace=found.namespace),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,  # Ctrl-C is ours: the request is cancelled over this very forward
        )  # fmt: skip
        output = self._forward.stdout
        if output is None:
            raise RuntimeError("a pipe was asked for")
        said, until_s = "", time.monotonic() + ANSWER_WITHIN_S
        while (left_s := until_s - time.monotonic()) > 0:
            if not select.select([output], [], [], left_s)[0]:
                break
            line = output.readline()
            if found_port := _FORWARDING.match(line):
                # It tells of every connection: whoever does not listen stops it.
                threading.Thread(target=output.read, daemon=True).start()
                return int(found_port[1])
            if not line:
                break
            said += line
        self.close()
        raise Unreachable(
            f"{found.name} in {self._context}", said.strip() or "kubectl forwards nothing", connected=False
        )
