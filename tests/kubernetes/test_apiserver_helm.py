"""The real helm against the tests' API server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.kubernetes.conftest import Run

STOKER = Path(__file__).parents[2] / "helm" / "stoker"
_TEMPLATE = """
{{- $kept := lookup "v1" "ConfigMap" .Release.Namespace .Release.Name }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .Release.Name }}
data:
  kept: {{ dig "data" "kept" (randAlphaNum 12) $kept | quote }}
  {{- with .Values.extra }}
  extra: {{ . | quote }}
  {{- end }}
"""


def chart(folder: Path) -> str:
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: small, version: 0.1.0}")
    (folder / "values.yaml").write_text("extra: ''\n")
    (folder / "templates" / "map.yaml").write_text(_TEMPLATE)
    return str(folder)


def test_a_chart_is_installed_upgraded_rolled_back_and_removed(helm: Run, kubectl: Run, tmp_path: Path) -> None:
    small = chart(tmp_path / "small")
    done = helm("install", "one", small, "--set", "extra=first")
    assert done.returncode == 0, done.stderr

    def data() -> dict[str, str]:
        found: dict[str, str] = json.loads(kubectl("get", "cm", "one", "-o", "json").stdout)["data"]
        return found

    kept = data()["kept"]
    assert len(kept) == 12 and data()["extra"] == "first"
    assert helm("upgrade", "one", small, "--set", "extra=second").returncode == 0
    assert data() == {"kept": kept, "extra": "second"}
    # What the chart no longer says goes.
    assert helm("upgrade", "one", small, "--set", "extra=").returncode == 0
    assert data() == {"kept": kept}
    assert helm("rollback", "one", "1").returncode == 0
    assert data() == {"kept": kept, "extra": "first"}
    revisions = json.loads(helm("history", "one", "-o", "json").stdout)
    assert [each["status"] for each in revisions] == ["superseded", "superseded", "superseded", "deployed"]
    assert helm("uninstall", "one").returncode == 0
    assert "NotFound" in kubectl("get", "cm", "one").stderr
    assert json.loads(kubectl("get", "secrets", "-o", "json").stdout)["items"] == []


def test_somebody_elses_change_is_a_conflict_that_helm_reports(helm: Run, kubectl: Run, tmp_path: Path) -> None:
    small = chart(tmp_path / "small")
    helm("install", "one", small, "--set", "extra=first")
    kubectl("patch", "cm", "one", "--type=merge", "-p", '{"data":{"extra":"mine"}}')
    refused = helm("upgrade", "one", small, "--set", "extra=second")
    assert refused.returncode != 0 and "conflict" in refused.stderr and ".data.extra" in refused.stderr
    assert helm("upgrade", "one", small, "--set", "extra=second", "--force-conflicts").returncode == 0


def test_stokers_own_chart_is_taken_as_it_is(helm: Run, kubectl: Run) -> None:
    done = helm("install", "st", str(STOKER), "--set", "image.repository=stoker")
    assert done.returncode == 0, done.stderr
    # Not their pods, which controllers may have replaced.
    kinds = "deployments,statefulsets,services,serviceaccounts,roles"
    before = kubectl("get", kinds, "-o", "jsonpath={.items[*].metadata.uid}").stdout
    done = helm("upgrade", "st", str(STOKER), "--set", "image.repository=stoker", "--set", "image.tag=next")
    assert done.returncode == 0, done.stderr
    assert kubectl("get", kinds, "-o", "jsonpath={.items[*].metadata.uid}").stdout == before
    assert helm("uninstall", "st").returncode == 0
