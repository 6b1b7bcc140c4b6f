"""The API server of the tests as a process of its own, with its scheduler and controller manager and no kubelets.

    python -m tests.kubernetes.apiserver KUBECONFIG      # written when it serves; until SIGTERM or SIGINT

The suite of Kubernetes then runs against it as against any real one: `make test-kubernetes STOKER_TEST_KUBECONFIG=...`.
Limits: as `tests.kubernetes.apiserver`; what it keeps ends with it.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
from pathlib import Path

from tests.kubernetes.addresses import Addresses
from tests.kubernetes.apiserver.server import ApiServer
from tests.kubernetes.client import Access
from tests.kubernetes.controllers import EVERY, Controllers
from tests.kubernetes.controllers.volumes import Claims


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.kubernetes.apiserver", description=__doc__.partition("\n")[0])
    parser.add_argument("kubeconfig", type=Path, help="where the administrator's kubeconfig is written")
    parser.add_argument("--node-grace-s", type=float, default=50.0, help="after which a silent node counts as lost")
    arguments = parser.parse_args()
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with (
        tempfile.TemporaryDirectory(prefix="stoker-apiserver-") as folder,
        ApiServer(Path(folder), Addresses().service) as server,
    ):
        authority = str(server.certificates.authority)
        manager = Access(server.url, server.system_token("kube-controller-manager"), authority)
        # Volumes are provisioned by whoever runs the pods: the tests.
        kinds = tuple(each for each in EVERY if each is not Claims)
        controllers = Controllers(manager, arguments.node_grace_s, kinds)
        controllers.start()
        Access(server.url, server.admin_token, authority).write_kubeconfig(arguments.kubeconfig, "admin", "default")
        print(f"{server.url} serves, {arguments.kubeconfig} leads there", flush=True)
        signal.sigwait(ends)
        controllers.stop()


if __name__ == "__main__":
    main()
