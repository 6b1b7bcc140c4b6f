"""Claims get volumes: one each, at once, of the class they name.

Upstream: `pkg/controller/volume/persistentvolume/pv_controller.go`; the provisioner is one that never fails. What a
volume is on this machine is the kubelet stand-in's affair.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.kubernetes.controllers.base import Controller, Key, Object, deleting, key_of

CLASSES = "storageclasses"


class Claims(Controller):
    plurals = ("persistentvolumeclaims", CLASSES, "persistentvolumes")

    def keys(self, plural: str, kind: str, value: Object) -> Iterable[Key]:
        if plural == "persistentvolumeclaims":
            return [key_of(value)]
        if plural == CLASSES:
            return [key_of(each) for each in self.world.all("persistentvolumeclaims")]
        claim = (value["spec"].get("claimRef")) or {}
        return [("", value["metadata"]["name"]), (claim.get("namespace", ""), claim.get("name", ""))]

    async def sync(self, key: Key) -> None:
        if not key[0]:
            await self._release(key)
            return
        claim = self.world.get("persistentvolumeclaims", key)
        if claim is None:
            for each in self.world.all("persistentvolumes"):
                reference = each["spec"].get("claimRef") or {}
                if (reference.get("namespace"), reference.get("name")) == key:
                    await self._release(("", each["metadata"]["name"]))
            return
        if deleting(claim) or (claim.get("status") or {}).get("phase") == "Bound":
            return
        spec = claim["spec"]
        name = spec.get("storageClassName")
        found = self.world.get(CLASSES, ("", name)) if name else None
        if found is None:
            if name:
                words = f'storageclass.storage.k8s.io "{name}" not found'
                await self.world.event(claim, "Warning", "ProvisioningFailed", words)
            return
        volume = f"pvc-{claim['metadata']['uid']}"
        capacity = spec["resources"]["requests"]
        body = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": capacity,
                "accessModes": spec["accessModes"],
                "persistentVolumeReclaimPolicy": found.get("reclaimPolicy", "Delete"),
                "storageClassName": name,
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "namespace": key[0],
                    "name": key[1],
                    "uid": claim["metadata"]["uid"],
                },
                "hostPath": {"path": f"/var/lib/volumes/{volume}"},
            },
        }
        made = await self.world.create("persistentvolumes", "", body)
        if made is not None:
            await self.world.patch("persistentvolumes", made, {"status": {"phase": "Bound"}}, "status")
        await self.world.patch("persistentvolumeclaims", claim, {"spec": {"volumeName": volume}})
        bound = self.world.get("persistentvolumeclaims", key)
        if bound is not None:
            status = {"phase": "Bound", "capacity": capacity, "accessModes": spec["accessModes"]}
            await self.world.set_status("persistentvolumeclaims", bound, status)

    async def _release(self, key: Key) -> None:
        volume = self.world.get("persistentvolumes", key)
        if volume is None:
            return
        reference = volume["spec"].get("claimRef") or {}
        claim = self.world.get("persistentvolumeclaims", (reference.get("namespace", ""), reference.get("name", "")))
        if claim is not None and claim["metadata"]["uid"] == reference.get("uid"):
            return
        if volume["spec"].get("persistentVolumeReclaimPolicy") == "Delete":
            await self.world.delete("persistentvolumes", volume)
        else:
            await self.world.patch("persistentvolumes", volume, {"status": {"phase": "Released"}}, "status")
