"""Volumes: each becomes a folder of this machine.

Upstream: `pkg/volume/{emptydir,secret,configmap,projected,downwardapi}`; the service account's token comes from the
server's TokenRequest, bound to the pod (`pkg/kubelet/token/token_manager.go`).

Secrets and ConfigMaps are written anew when they change, at once (a kubelet takes up to a minute); tokens when a
fifth of their time is left. Limits: downward API files are written once; sizes are not limited; a claim's folder
lasts as long as the cluster.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kubernetes.client import Client, path_of
from tests.kubernetes.kubelet.environment import ConfigError, Reader, bytes_of, field_of, resource_of

Object = dict[str, Any]
_MODE = 0o644


class MountError(Exception):
    """What keeps a pod from starting: reported as a FailedMount event."""


class Volumes:
    """The folders of one pod."""

    def __init__(self, pod: Object, folder: Path, memory: Path, claims: Path) -> None:
        self._pod = pod
        self._folder = folder
        self._memory = memory
        self._claims = claims
        self.places: dict[str, tuple[Path, bool]] = {}
        # Sources that are written into folders, to be written again when they change.
        self._sources: list[tuple[Object, Path]] = []
        self.tokens_last_s: float | None = None

    async def make(self, client: Client, read: Reader, *, host_ip: str, pod_ip: str) -> None:
        for each in self._pod["spec"].get("volumes") or []:
            self.places[each["name"]] = await self._one(each, client, read, host_ip, pod_ip)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.rmtree(self._memory, ignore_errors=True)

    async def _one(self, volume: Object, client: Client, read: Reader, host_ip: str, pod_ip: str) -> tuple[Path, bool]:
        name, namespace = volume["name"], self._pod["metadata"]["namespace"]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"]), False
        if "persistentVolumeClaim" in volume:
            return await self._claim(volume["persistentVolumeClaim"], client, namespace)
        in_memory = (volume.get("emptyDir") or {}).get("medium") == "Memory"
        path = (self._memory if in_memory else self._folder) / name
        path.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            path.chmod(0o777)
            return path, False
        sources = (volume.get("projected") or {}).get("sources") or [volume]
        for source in sources:
            await self._project(source, path, client, read, host_ip, pod_ip)
            self._sources.append((source, path))
        return path, True

    def reads(self, kind: str, name: str) -> bool:
        """Whether it shows a Secret or ConfigMap of this name."""
        field = "secret" if kind == "secrets" else "configMap"
        found = [source[field] for source, _ in self._sources if field in source]
        return any(name in (each.get("name"), each.get("secretName")) for each in found)

    async def rewrite(
        self, pod: Object, client: Client, read: Reader, *, host_ip: str, pod_ip: str, tokens: bool
    ) -> None:
        """Brings the files up to date; `tokens` says whether it is those that are renewed, or everything else."""
        self._pod = pod
        for source, path in self._sources:
            if ("serviceAccountToken" in source) == tokens:
                with suppress(MountError):
                    await self._project(source, path, client, read, host_ip, pod_ip)

    async def _claim(self, reference: Object, client: Client, namespace: str) -> tuple[Path, bool]:
        claim = await client.get("persistentvolumeclaims", namespace, reference["claimName"])
        if claim is None:
            raise MountError(f'persistentvolumeclaim "{reference["claimName"]}" not found')
        if (claim.get("status") or {}).get("phase") != "Bound":
            raise MountError(f'persistentvolumeclaim "{reference["claimName"]}" is not bound')
        path = self._claims / claim["spec"]["volumeName"]
        path.mkdir(parents=True, exist_ok=True)
        return path, bool(reference.get("readOnly"))

    async def _project(
        self, source: Object, path: Path, client: Client, read: Reader, host_ip: str, pod_ip: str
    ) -> None:
        namespace = self._pod["metadata"]["namespace"]
        for field, kind in (("secret", "secrets"), ("configMap", "configmaps")):
            if field in source:
                reference = source[field]
                name = reference.get("name") or reference.get("secretName")
                value = await read(kind, namespace, name)
                if value is None:
                    if reference.get("optional"):
                        return
                    raise MountError(f'{kind[:-1]} "{name}" not found')
                _write_keys(kind, value, reference, path)
        if "downwardAPI" in source:
            for item in source["downwardAPI"].get("items") or []:
                if "fieldRef" in item:
                    text = field_of(self._pod, item["fieldRef"]["fieldPath"], host_ip=host_ip, pod_ip=pod_ip)
                else:
                    text = resource_of({}, self._pod, item["resourceFieldRef"], {})
                _write(path / item["path"], text.encode(), item.get("mode"))
        if "serviceAccountToken" in source:
            wanted = source["serviceAccountToken"]
            token = await self._token(client, wanted)
            lasting_s = float(wanted.get("expirationSeconds", 3600))
            self.tokens_last_s = min(self.tokens_last_s or lasting_s, lasting_s)
            _write(path / wanted["path"], token.encode(), 0o600)

    async def _token(self, client: Client, wanted: Object) -> str:
        metadata = self._pod["metadata"]
        spec: Object = {
            "expirationSeconds": wanted.get("expirationSeconds", 3600),
            "audiences": [wanted["audience"]] if wanted.get("audience") else [],
            "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]},
        }
        account = self._pod["spec"].get("serviceAccountName", "default")
        path = path_of("serviceaccounts", metadata["namespace"], account, "token")
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await client.call("POST", path, body)
        return str(answer["status"]["token"])


def _write_keys(kind: str, value: Object, reference: Object, path: Path) -> None:
    keys = [*(value.get("data") or {}), *(value.get("binaryData") or {})]
    items = reference.get("items") or [{"key": key, "path": key} for key in keys]
    for item in items:
        if item["key"] not in keys:
            if reference.get("optional"):
                continue
            raise MountError(f"references non-existent {kind[:-1]} key: {item['key']}")
        mode = item.get("mode") or reference.get("defaultMode") or _MODE
        _write(path / item["path"], bytes_of(kind, value, item["key"]), mode)


def _write(path: Path, content: bytes, mode: int | None) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.chmod(mode or _MODE)
    part.replace(path)


__all__ = ["ConfigError", "MountError", "Volumes"]
