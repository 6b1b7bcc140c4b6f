"""How a container of a pod is started: pulled, given its environment and mounts, and launched.

Upstream: `pkg/kubelet/kuberuntime/kuberuntime_container.go` (startContainer), `pkg/kubelet/kubelet_pods.go`
(makeMounts).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests.kubernetes.kubelet import processes
from tests.kubernetes.kubelet.environment import environment_of, expanded, service_links
from tests.kubernetes.kubelet.processes import Mount, Running, StartError
from tests.kubernetes.kubelet.volumes import Volumes

if TYPE_CHECKING:
    from tests.kubernetes.kubelet.kubelet import Kubelet

Object = dict[str, Any]


class PullError(Exception):
    """An image that could not be had: reported as ErrImagePull."""


class Launching:
    """Starts the containers of one pod."""

    def __init__(self, kubelet: Kubelet, folder: Path, volumes: Volumes) -> None:
        self._kubelet = kubelet
        self._folder = folder
        self._volumes = volumes

    async def launch(self, pod: Object, container: Object, restart: int, address: str, shown: str) -> Running:
        """`shown`: the address by which others know it."""
        await self._pull(pod, container)
        refusal = self._kubelet.create_fault(pod)
        if refusal is not None:
            raise StartError(refusal)
        env = await self._environment(pod, container, shown)
        command = [*(container.get("command") or self._kubelet.entrypoint(container)), *(container.get("args") or [])]
        command = self._kubelet.resolved([expanded(each, env) for each in command])
        command = [_own(each, address) for each in command]
        env = {name: _own(each, address) for name, each in env.items()}
        root = self._folder / "roots" / f"{container['name']}-{restart}"
        cwd = container.get("workingDir") or "/"
        with _opened(self._kubelet.log_path(pod, container["name"], restart)) as file:
            # What an image of its own kind runs is not what was imported here.
            forks = self._kubelet.forks and not self._kubelet.environment_of_image(container["image"])
            mounts = self._mounts(pod, container, address)
            return await processes.start(command, env, cwd, mounts, root, file, forks)

    async def _pull(self, pod: Object, container: Object) -> None:
        image, node = container["image"], pod["spec"]["nodeName"]
        if not self._kubelet.must_pull(node, container):
            return
        await self._kubelet.event(pod, "Normal", "Pulling", f'Pulling image "{image}"')
        fault = self._kubelet.pull_fault(image)
        if fault is not None:
            raise PullError(f'failed to pull and unpack image "{image}": {fault}')
        await asyncio.sleep(self._kubelet.pull_s)
        await self._kubelet.event(pod, "Normal", "Pulled", f'Successfully pulled image "{image}"')
        self._kubelet.pulled(node, image)

    async def _environment(self, pod: Object, container: Object, address: str) -> dict[str, str]:
        base, node = self._kubelet.base_environment(pod, container), pod["spec"]["nodeName"]
        if pod["spec"].get("enableServiceLinks", True):
            namespace = pod["metadata"]["namespace"]
            base |= service_links(self._kubelet.services(), namespace, self._kubelet.proxy.addresses)
        return await environment_of(
            pod,
            container,
            self._kubelet.read,
            base,
            host_ip=self._kubelet.host_ip(node),
            pod_ip=address,
            allocatable=self._kubelet.allocatable(node),
        )

    def _mounts(self, pod: Object, container: Object, address: str) -> list[Mount]:
        own: list[Mount] = []
        if processes.can_isolate():
            own.append(Mount(self.write_hosts(pod, address), "/etc/hosts"))
            if not (container.get("securityContext") or {}).get("readOnlyRootFilesystem"):
                own.append(Mount(self._scratch("tmp"), "/tmp"))
        made = []
        for each in container.get("volumeMounts") or []:
            source, read_only = self._volumes.places[each["name"]]
            if each.get("subPath"):
                source = source / each["subPath"]
                if not source.exists():
                    source.mkdir(parents=True)
            target = each["mountPath"].rstrip("/") or "/"
            made.append(Mount(source, target, read_only or bool(each.get("readOnly"))))
        targets = {each.target for each in made}
        return [*(each for each in own if each.target not in targets), *made]

    def write_hosts(self, pod: Object, address: str) -> Path:
        """Written in place: what is mounted is the file, not its name."""
        path = self._folder / "etc" / "hosts"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._kubelet.hosts(pod, address))
        return path

    def _scratch(self, name: str) -> Path:
        path = self._folder / "scratch" / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o1777)
        return path


def _own(text: str, address: str) -> str:
    """All pods share one network: every address there is means the pod's own."""
    return text.replace("0.0.0.0", address).replace("[::]", address)


def _opened(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "wb")
