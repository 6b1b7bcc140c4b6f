"""What a container finds in its environment, and what `$(NAME)` in its command becomes.

Upstream: `pkg/kubelet/kubelet_pods.go` (makeEnvironmentVariables), `pkg/kubelet/envvars/envvars.go` (service links),
`third_party/forked/golang/expansion/expand.go`, `pkg/fieldpath/fieldpath.go`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Mapping
from decimal import ROUND_CEILING
from typing import Any

from tests.kubernetes.quantities import parse_quantity

Object = dict[str, Any]
# Kind, namespace and name of a Secret or ConfigMap to the object, or None.
Reader = Callable[[str, str, str], Awaitable[Object | None]]
_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class ConfigError(Exception):
    """What keeps a container from being made: reported as CreateContainerConfigError."""


def expanded(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` where it is known, `$$` as a dollar; an unknown name stays as it stands."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return values.get(match[1], match[0])

    return _REFERENCE.sub(one, text)


def field_of(pod: Object, path: str, *, host_ip: str, pod_ip: str) -> str:
    metadata = pod["metadata"]
    subscript = _SUBSCRIPT.fullmatch(path)
    if subscript:
        return str((metadata.get(subscript[1]) or {}).get(subscript[2], ""))
    match path:
        case "metadata.name" | "metadata.namespace" | "metadata.uid":
            return str(metadata[path.partition(".")[2]])
        case "metadata.labels" | "metadata.annotations":
            held = metadata.get(path.partition(".")[2]) or {}
            return "\n".join(f'{name}="{each}"' for name, each in sorted(held.items()))
        case "spec.nodeName":
            return str(pod["spec"].get("nodeName", ""))
        case "spec.serviceAccountName":
            return str(pod["spec"].get("serviceAccountName", ""))
        case "status.hostIP" | "status.hostIPs":
            return host_ip
        case "status.podIP" | "status.podIPs":
            return pod_ip
    raise ConfigError(f"unsupported fieldPath: {path}")


def resource_of(container: Object, pod: Object, reference: Object, allocatable: Mapping[str, str]) -> str:
    """`resourceFieldRef`; a limit that is not set is the node's (`pkg/api/v1/resource/helpers.go`)."""
    named = reference.get("containerName")
    source = next((each for each in pod["spec"]["containers"] if each["name"] == named), container)
    kind, _, name = reference["resource"].partition(".")
    held = (source.get("resources") or {}).get(kind) or {}
    value = held.get(name)
    if value is None:
        value = allocatable.get(name, "0") if kind == "limits" else "0"
    divisor = parse_quantity(reference.get("divisor") or "0") or parse_quantity("1")
    return str(int((parse_quantity(value) / divisor).to_integral_value(ROUND_CEILING)))


def service_links(services: list[Object], namespace: str, addresses: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Variables of every service of the namespace, as Docker's links once were: they may shadow a program's own."""
    found: dict[str, str] = {}
    for service in services:
        name = service["metadata"]["name"]
        ports = service["spec"].get("ports") or []
        address = addresses.get((namespace, name))
        if service["metadata"]["namespace"] != namespace or not address or not ports:
            continue
        prefix = name.upper().replace("-", "_")
        first = ports[0]
        found |= {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(first["port"])}
        found[f"{prefix}_PORT"] = f"{first['protocol'].lower()}://{address}:{first['port']}"
        for port in ports:
            if port.get("name"):
                found[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
            link = f"{prefix}_PORT_{port['port']}_{port['protocol']}"
            found |= {
                link: f"{port['protocol'].lower()}://{address}:{port['port']}",
                f"{link}_PROTO": port["protocol"].lower(),
                f"{link}_PORT": str(port["port"]),
                f"{link}_ADDR": address,
            }
    return found


async def environment_of(
    pod: Object,
    container: Object,
    read: Reader,
    base: Mapping[str, str],
    *,
    host_ip: str,
    pod_ip: str,
    allocatable: Mapping[str, str],
) -> dict[str, str]:
    namespace = pod["metadata"]["namespace"]
    found = dict(base)
    for source in container.get("envFrom") or []:
        for kind, reference in (("configmaps", source.get("configMapRef")), ("secrets", source.get("secretRef"))):
            if reference is None:
                continue
            value = await read(kind, namespace, reference["name"])
            if value is None:
                if reference.get("optional"):
                    continue
                raise ConfigError(f'{kind[:-1]} "{reference["name"]}" not found')
            for key in value.get("data") or {}:
                found[source.get("prefix", "") + key] = text_of(kind, value, key)
    for each in container.get("env") or []:
        source = each.get("valueFrom")
        if source is None:
            found[each["name"]] = expanded(each.get("value", ""), found)
        elif "fieldRef" in source:
            found[each["name"]] = field_of(pod, source["fieldRef"]["fieldPath"], host_ip=host_ip, pod_ip=pod_ip)
        elif "resourceFieldRef" in source:
            found[each["name"]] = resource_of(container, pod, source["resourceFieldRef"], allocatable)
        else:
            value = await _keyed(source, namespace, read)
            if value is not None:
                found[each["name"]] = value
    return found


async def _keyed(source: Object, namespace: str, read: Reader) -> str | None:
    kind = "secrets" if "secretKeyRef" in source else "configmaps"
    reference = source.get("secretKeyRef") or source["configMapKeyRef"]
    value = await read(kind, namespace, reference["name"])
    if value is None:
        if reference.get("optional"):
            return None
        raise ConfigError(f'{kind[:-1]} "{reference["name"]}" not found')
    if reference["key"] not in (value.get("data") or {}):
        if reference.get("optional"):
            return None
        word = "Secret" if kind == "secrets" else "ConfigMap"
        raise ConfigError(f"couldn't find key {reference['key']} in {word} {namespace}/{reference['name']}")
    return text_of(kind, value, reference["key"])


def text_of(kind: str, value: Object, key: str) -> str:
    return bytes_of(kind, value, key).decode()


def bytes_of(kind: str, value: Object, key: str) -> bytes:
    data = (value.get("data") or {}).get(key)
    if data is None:
        return base64.b64decode((value.get("binaryData") or {})[key])
    return base64.b64decode(data) if kind == "secrets" else str(data).encode()
