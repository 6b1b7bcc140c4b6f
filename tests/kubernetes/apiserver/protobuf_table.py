"""Makes `protobuf_fields.json`: of each type, the number, name and form of its fields in protobuf.

Run by hand when the version of Kubernetes moves: `python -m tests.kubernetes.apiserver.protobuf_table FOLDER`, with
the `types.go` of `k8s.io/api` in FOLDER/GROUP/VERSION and those of `k8s.io/apimachinery/pkg/apis/meta/v1` in
FOLDER/meta/v1. The numbers are in the struct tags, and whether a zero counts (a pointer) only there.

Form of a field: `[name, kind, repeated, pointer]`; `name` is empty for one that JSON inlines; `kind` is string, int,
bool, bytes, double, time, quantity, intstr, raw, or a message; repeated is "", "list" or "map".
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_TYPE = re.compile(r"^type (\w+) struct \{\n(.*?)^\}", re.M | re.S)
_ALIAS = re.compile(r"^type (\w+) ((?:map\[[\w.]+\])?(?:\[\])?[\w.]+)$", re.M)
_FIELD = re.compile(r"^\s+(?:(\w+)\s+)?([*\[\]\w.]+)\s+`([^`]*)`", re.M)
_IMPORT = re.compile(r'^\s+(\w+) "k8s\.io/(?:api|apimachinery/pkg/apis)/(\w+)/(\w+)"', re.M)
_SIMPLE = {
    "string": "string",
    "bool": "bool",
    "int": "int",
    "int32": "int",
    "int64": "int",
    "uint32": "int",
    "byte": "int",
}
_SIMPLE |= {
    "float64": "double",
    "metav1.Time": "time",
    "Time": "time",
    "metav1.MicroTime": "micro",
    "MicroTime": "micro",
}
_SIMPLE |= {"metav1.Duration": "int", "resource.Quantity": "quantity", "intstr.IntOrString": "intstr"}
_SIMPLE |= {"runtime.RawExtension": "raw", "types.UID": "string", "types.NodeName": "string", "FieldsV1": "raw"}


def table(folder: Path) -> dict[str, dict[str, list[object]]]:
    structs: dict[tuple[str, str], tuple[str, dict[str, str]]] = {}
    aliases: dict[tuple[str, str], str] = {}
    for file in sorted(folder.rglob("*.go")):
        package = f"{file.parent.parent.name}.{file.parent.name}"
        text = re.sub(r"^\s*//.*\n", "", file.read_text(), flags=re.M)
        imports = {name: f"{group}.{version}" for name, group, version in _IMPORT.findall(text)}
        imports.setdefault("v1", "core.v1")
        for name, body in _TYPE.findall(text):
            structs[package, name] = (body, imports)
        for name, target in _ALIAS.findall(text):
            aliases[package, name] = target
    return {
        f"{package}.{name}": dict(_fields(package, body, imports, aliases, structs))
        for (package, name), (body, imports) in structs.items()
        if "protobuf:" in body
    }


def _fields(package, body, imports, aliases, structs):  # type: ignore[no-untyped-def]
    for _, kind, tags in _FIELD.findall(body):
        number = re.search(r'protobuf:"\w+,(\d+),', tags)
        name = re.search(r'json:"([^",]*)', tags)
        if number is None or name is None:
            continue
        pointer = kind.startswith("*")
        repeated, kind = "", kind.lstrip("*")
        for _ in range(4):
            if kind == "[]byte":
                kind = "bytes"
                break
            if kind.startswith("[]"):
                repeated, kind = "list", kind[2:].lstrip("*")
            elif kind.startswith("map["):
                repeated, kind = "map", kind.partition("]")[2]
            elif kind in _SIMPLE:
                kind = _SIMPLE[kind]
                break
            else:
                prefix, _, last = kind.rpartition(".")
                home = imports.get(prefix, "meta.v1" if prefix == "metav1" else package) if prefix else package
                if (home, last) in structs:
                    kind = f"{home}.{last}"
                    break
                target = aliases.get((home, last))
                if target is None:
                    break
                if repeated == "map" and target.startswith("[]"):
                    kind = "strings"
                    break
                kind = target
        yield number[1], [name[1], kind, repeated, pointer]


if __name__ == "__main__":
    made = table(Path(sys.argv[1]))
    target = Path(__file__).with_name("protobuf_fields.json")
    lines = (f"{json.dumps(name)}: {json.dumps(made[name], separators=(',', ':'))}" for name in sorted(made))
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
