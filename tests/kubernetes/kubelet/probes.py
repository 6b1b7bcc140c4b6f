"""Probes of a container: HTTP, TCP, commands.

Upstream: `pkg/kubelet/prober/{prober,worker}.go`, `pkg/probe/http/http.go` (200 to 399 is success).

Limits: a gRPC probe only connects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

Object = dict[str, Any]
# Runs a command in the container: exit code and output.
Execute = Callable[[list[str], float], Awaitable[tuple[int, bytes]]]


class Prober:
    """Tries one probe until it is cancelled, and tells every change of its verdict."""

    def __init__(self, probe: Object, container: Object, address: str, execute: Execute) -> None:
        self._probe = probe
        self._container = container
        self._address = address
        self._execute = execute

    async def until_success(self, failed: Callable[[str], None]) -> None:
        """A startup probe: returns at the first success; `failed` is told when its tries are used up."""
        await asyncio.sleep(self._probe.get("initialDelaySeconds", 0))
        failures = 0
        while True:
            good, words = await self.once()
            if good:
                return
            failures += 1
            if failures >= self._probe["failureThreshold"]:
                failed(words)
                return
            await asyncio.sleep(self._probe["periodSeconds"])

    async def follow(self, told: Callable[[bool, str], None], first: bool) -> None:
        """`told(verdict, words)` at each change, from `first` on."""
        await asyncio.sleep(self._probe.get("initialDelaySeconds", 0))
        verdict, run = first, 0
        while True:
            good, words = await self.once()
            if good == verdict:
                run = 0
            else:
                run += 1
                if run >= self._probe["successThreshold" if good else "failureThreshold"]:
                    verdict, run = good, 0
                    told(verdict, words)
            await asyncio.sleep(self._probe["periodSeconds"])

    async def once(self) -> tuple[bool, str]:
        timeout_s = float(self._probe["timeoutSeconds"])
        try:
            if "httpGet" in self._probe:
                return await self._http(self._probe["httpGet"], timeout_s)
            if "exec" in self._probe:
                code, output = await self._execute(self._probe["exec"]["command"], timeout_s)
                return code == 0, output.decode(errors="replace")
            action = self._probe.get("tcpSocket") or self._probe.get("grpc") or {}
            _, writer = await asyncio.wait_for(
                asyncio.open_connection(action.get("host") or self._address, self._port(action["port"])), timeout_s
            )
            writer.close()
            return True, ""
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            return False, str(error) or type(error).__name__

    async def _http(self, action: Object, timeout_s: float) -> tuple[bool, str]:
        host = action.get("host") or self._address
        url = f"{action['scheme'].lower()}://{host}:{self._port(action['port'])}/{action['path'].lstrip('/')}"
        headers = {each["name"]: each["value"] for each in action.get("httpHeaders") or []}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers={"User-Agent": "kube-probe/1.37", **headers}) as session,
            session.get(url, ssl=False, allow_redirects=False) as answer,
        ):
            if 200 <= answer.status < 400:
                return True, ""
            return False, f"HTTP probe failed with statuscode: {answer.status}"

    def _port(self, port: int | str) -> int:
        if isinstance(port, int) or port.isdigit():
            return int(port)
        return next(
            int(each["containerPort"]) for each in self._container.get("ports") or [] if each.get("name") == port
        )
