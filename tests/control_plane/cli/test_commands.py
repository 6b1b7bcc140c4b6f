"""Every command that reports, against a running service: what it prints, what --json gives, how it fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.control_plane.cli.conftest import Stoker, run
from tests.support.service import Service

COMMAND = [sys.executable, "-m", "control_plane.cli.main"]


@pytest.fixture
def deployed(stoker: Stoker, model: str) -> str:
    said = stoker("deploy", "echo", "--model", model, "--engine", "stub", "--keep-alive", "2", "--alias", "gpt-echo")
    assert said.status == 0, said.err
    return "echo"


def test_deploying_twice_the_same_is_one_revision_and_a_change_is_the_next(stoker: Stoker, model: str) -> None:
    options = ("deploy", "twice", "--model", model, "--engine", "stub", "--json")
    first, again = stoker(*options), stoker(*options)
    assert (first.json["revision"], again.json["revision"]) == (1, 1)
    assert first.json["import"]["state"] == "ready"
    assert stoker(*options, "--max-replicas", "3").json["revision"] == 2
    assert stoker("rollback", "twice").out == "twice serves revision 3\n"
    assert "twice is deleted" in stoker("delete", "twice").out
    gone = stoker("delete", "twice")
    assert (gone.status, "next: see what there is with `stoker ls`" in gone.err) == (1, True)


def test_a_spec_file_is_deployed_and_its_faults_are_named(stoker: Stoker, model: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"name: filed\nmodel: {model}\nengine: stub\nscaling:\n  max_replicas: 2\n")
    assert stoker("deploy", str(spec), "--json").json["spec"]["scaling"]["max_replicas"] == 2
    over = stoker("deploy", str(spec), "--keep-alive", "3", "--json").json["spec"]["scaling"]
    assert (over["max_replicas"], over["keep_alive"]) == (2, 3.0)
    spec.write_text(f"name: filed\nmodel: {model}\nscaling:\n  max_replica: 2\n")
    bad = stoker("deploy", str(spec))
    assert bad.status == 1
    assert "scaling.max_replica" in bad.err
    spec.write_text("name: [\n")
    assert "line 2" in stoker("deploy", str(spec)).err
    missing = stoker("deploy", str(tmp_path / "none.yaml"))
    assert (missing.status, "cannot be read" in missing.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("deploy", "nameless"), "no model is named"),
        (("deploy", "Bad_Name", "--model", "file:///x"), "no function name"),
        (("deploy", "fn", "--model", "ftp://x"), "no model URI"),
        (("deploy", "fn", "--model", "file:///x", "--keep-alive", "soon"), "auto or a number of seconds"),
        (("usage", "--by", "moon"), "function, key or day"),
        (("why", "rep-000000000000"), "there is no replica"),
        (("invoke", "nobody", "hi"), "nobody"),
        (("logs", "nobody"), "no function nobody"),
        (("resume", "what"), "no request id"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors_say_what_and_exit_non_zero(stoker: Stoker, arguments: tuple[str, ...], told: str) -> None:
    plain, as_json = stoker(*arguments), stoker(*arguments, "--json")
    assert plain.status != 0
    assert told in plain.err
    assert plain.err.startswith("stoker: ")
    assert set(json.loads(as_json.err)["error"]) == {"code", "message", "hint"}


def test_a_model_that_cannot_be_used_fails_the_deploy_with_its_reason(stoker: Stoker, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 60)
    said = stoker("deploy", "broken", "--model", f"file://{tmp_path / 'broken.gguf'}")
    assert said.status == 1
    assert "the model of broken cannot be used" in said.err
    assert "failed" in stoker("ls").out
    stoker("delete", "broken")


def test_invoke_gives_the_same_text_streamed_or_not_and_under_an_alias(stoker: Stoker, deployed: str) -> None:
    options = ("--max-tokens", "12", "--seed", "7", "--raw")
    whole = stoker("invoke", deployed, "hello", *options)
    streamed = stoker("invoke", "gpt-echo", "hello", "--stream", *options)
    assert whole.status == streamed.status == 0, whole.err + streamed.err
    assert whole.out == streamed.out
    assert "12 tokens in" in streamed.err
    answer = stoker("invoke", deployed, "-", *options, "--json", stdin="hello").json
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("text_completion", 12)
    assert answer["choices"][0]["text"] + "\n" == whole.out
    lines = stoker("invoke", deployed, "hello", "--stream", *options, "--json").out.splitlines()
    events = [json.loads(line) for line in lines]
    assert events[-1]["data"]["usage"]["completion_tokens"] == 12
    rest = stoker("resume", answer["id"], "5", "--json").out.splitlines()
    assert json.loads(rest[0])["seq"] > 5


def test_ls_ps_logs_why_and_usage_report_what_ran(stoker: Stoker, deployed: str) -> None:
    answer = stoker("invoke", deployed, "hello", "--max-tokens", "5", "--raw", "--json").json
    assert f"{deployed} " in stoker("ls").out
    (function,) = [item for item in stoker("ls", "--json").json["data"] if item["name"] == deployed]
    assert function["replicas"] == 1
    replica = next(item for item in stoker("ps", "--json").json["data"] if item["function"] == deployed)
    assert (replica["state"], replica["pid"] > 0) == ("ready", True)
    assert replica["replica_id"] in stoker("ps").out
    assert stoker("logs", deployed).status == 0
    why = stoker("why", answer["id"])
    assert f"request {answer['id']}: done" in why.out
    assert "replica ready" in stoker("why", replica["replica_id"]).out
    assert "from_zero" in stoker("why", deployed).out
    assert stoker("why", deployed, "--json").json["kind"] == "function"
    for by in ("function", "key", "day"):
        rows = stoker("usage", "--by", by, "--json").json["data"]
        assert sum(row["num_model_requests"] for row in rows) >= 1
        assert set(rows[0]["cost_microusd"]) == {"active", "cold_start", "idle", "overhead", "unreported"}
    assert deployed in stoker("usage").out


def test_keys_are_shown_once_and_end_at_once(stoker: Stoker, monkeypatch: pytest.MonkeyPatch) -> None:
    made = stoker("keys", "create", "laptop", "--json").json
    assert made["key"].startswith("sk-stoker-")
    assert made["key"] not in stoker("keys", "ls", "--json").out
    assert "laptop" in stoker("keys", "ls").out
    monkeypatch.setenv("STOKER_API_KEY", made["key"])
    refused = run("keys", "ls")
    assert (refused.status, "admin key" in refused.err) == (1, True)
    monkeypatch.delenv("STOKER_API_KEY")
    assert stoker("keys", "revoke", made["id"]).status == 0
    monkeypatch.setenv("STOKER_API_KEY", made["key"])
    assert "STOKER_API_KEY" in run("ls").err


def test_ctrl_c_cancels_the_request_in_the_service(service: Service, stoker: Stoker, deployed: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "invoke", deployed, "hi", "--stream", "--raw", "--max-tokens", "2000", "-d", str(service.data_dir)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # As at a terminal; a suite that runs in the background hands an ignored SIGINT down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    request_id = err.split("request ")[1].split(" ")[0]
    assert f"request {request_id} is cancelled" in err
    assert service.call("GET", f"/api/v1/why/{request_id}")["state"] == "cancelled"


def test_a_second_up_is_refused_with_the_pid_of_the_holder(service: Service, stoker: Stoker) -> None:
    assert service.process is not None
    for arguments in (("up", "--port", "0"), ("up", "--port", "0", "--json")):
        said = stoker(*arguments)
        assert said.status == 1
        assert f"process {service.process.pid}" in said.err


def test_a_port_in_use_is_said(service: Service, stoker: Stoker, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "up", "-d", str(tmp_path / "other"), "--port", str(service.port)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, "cannot listen on" in done.stderr) == (1, True), done.stderr


def test_where_nothing_runs_commands_say_how_to_start_it(stoker: Stoker, tmp_path: Path) -> None:
    for arguments in (("ls",), ("ps",), ("invoke", "fn", "hi"), ("down",)):
        said = stoker(*arguments, "-d", str(tmp_path))
        assert said.status == 1
        assert "next: " in said.err
    assert "stoker up" in stoker("ls", "-d", str(tmp_path)).err


def test_a_stream_goes_on_when_the_service_is_killed_and_comes_back(
    service: Service, stoker: Stoker, deployed: str
) -> None:
    options = ("--raw", "--max-tokens", "80", "--seed", "3")
    undisturbed = stoker("invoke", deployed, "tell", *options).out
    process = subprocess.Popen(
        [*COMMAND, "invoke", deployed, "tell", "--stream", *options, "-d", str(service.data_dir)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(3)
    service.kill("gateway")
    service.start()
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (first + rest).decode() == undisturbed
    assert b"resumed" in err


def test_down_ends_service_agents_and_replicas(service: Service, stoker: Stoker, deployed: str) -> None:
    stoker("invoke", deployed, "hello", "--max-tokens", "2", "--raw")
    said = stoker("down", "--grace", "5", "--json")
    assert said.status == 0, said.err
    if service.process is not None:
        service.process.wait(timeout=5)
    assert service.family() == []
    assert not (service.data_dir / "control.json").exists()
    assert stoker("down").status == 1
    service.start()


def test_a_tenant_says_how_long_its_requests_are_kept(stoker: Stoker) -> None:
    assert "the installation's rule" in stoker("retention", "show").out
    said = stoker("retention", "set", "--log", "120")
    assert "log and input: kept 120 s after the end (tenant default's own)" in said.out
    assert stoker("retention", "show", "--json").json["own"] == {"log_s": 120.0, "request_s": None}
    refused = stoker("retention", "set", "--request", "60")
    assert (refused.status, "request_s" in refused.err) == (1, True)
    assert "default's own" not in stoker("retention", "reset").out


def test_budgets_are_set_shown_and_taken_away(stoker: Stoker) -> None:
    assert "no budgets" in stoker("budgets", "ls").out
    said = stoker("budgets", "set", "tokens", "day", "1000000")
    assert said.out == "tenant default: 1000000 tokens in a day, 0 spent\n"
    assert "tokens  day     1000000" in stoker("budgets", "ls").out.replace("\t", "  ")
    refused = stoker("budgets", "set", "tokens", "year", "1")
    assert (refused.status, "period" in refused.err) == (1, True)
    assert "no budget of tokens" in stoker("budgets", "rm", "tokens", "day").out


def test_quotas_are_set_shown_and_taken_away(stoker: Stoker) -> None:
    said = stoker("quotas", "set", "acme", "--devices", "4", "--weight", "2")
    assert said.out == "tenant acme: at most 4 devices, weight 2; holds 0\n"
    rows = [line.split() for line in stoker("quotas", "ls").out.splitlines()]
    assert ["acme", "4", "2", "0", "0", "-"] in [row[:6] for row in rows]
    said = stoker("quotas", "set", "acme", "--kv-bytes", "1048576")
    assert said.out == "tenant acme: any number of devices, weight 1; holds 0; keeps at most 1 MiB of KV\n"
    assert "1 MiB" in next(line for line in stoker("quotas", "ls").out.splitlines() if line.startswith("acme"))
    assert stoker("quotas", "rm", "acme").out == "tenant acme has no quota any more\n"
    refused = stoker("quotas", "rm", "acme")
    assert (refused.status, "acme has no quota" in refused.err) == (1, True)
