"""The commands of `gradwire`, with their options and help texts.

Each command imports what it needs when it runs, so that the help appears at once.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import typer

from gradwire.errors import DOCS_URL

_F = TypeVar("_F", bound=Callable[..., Any])

_EXIT_CODES = "Exit codes: 0 success, 1 failed, 2 usage error, 130 Ctrl-C."
_PROGRAM_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="gradwire",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
    rich_markup_mode="rich",
    epilog=_EXIT_CODES,
)
keys = typer.Typer(
    no_args_is_help=True,
    context_settings=_HELP,
    help="Create, sign and inspect the keys of clusters that span several machines.",
    epilog=f"{_EXIT_CODES} More: {DOCS_URL}guides/clusters.html",
)
app.add_typer(keys, name="keys")


def _command(group: typer.Typer, **settings: Any) -> Callable[[_F], _F]:
    """Add a command whose docstring is its help: paragraphs are filled anew, indented lines stay as they are."""

    def add(function: _F) -> _F:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(part if part.startswith(" ") else part.replace("\n", " ") for part in paragraphs)
        decorated: _F = group.command(help=text, **settings)(function)
        return decorated

    return add


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from gradwire.versions import GRADWIRE_VERSION

        typer.echo(f"gradwire {GRADWIRE_VERSION}")
        raise typer.Exit


@app.callback()
def gradwire(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Call functions in other processes and on other machines, and differentiate through those calls.

    [bold]Examples[/]

      gradwire doctor
      gradwire run -n 4 train.py --epochs 3
      gradwire status
    """


_Program = Annotated[str, typer.Argument(metavar="PROGRAM", help="A script or, with [bold]-m[/], a module.")]
_Arguments = Annotated[
    Optional[list[str]],  # noqa: UP045  # typer reads this on Python 3.10 as well
    typer.Argument(metavar="ARGS", help="Arguments of the program.", show_default=False),
]
_IsModule = Annotated[bool, typer.Option("-m", "--module", help="PROGRAM is a module, as in [bold]python -m[/].")]


@_command(
    app,
    context_settings=_PROGRAM_SETTINGS,
    epilog="Exit code: that of the first rank that fails (128 + N if signal N killed it), else 0; 2 usage error; "
    "130 Ctrl-C.",
)
def run(
    program: _Program,
    args: _Arguments = None,
    num_ranks: Annotated[
        int, typer.Option("-n", "--num-ranks", metavar="N", min=1, max=65_535, help="Number of processes.")
    ] = 1,
    is_module: _IsModule = False,
    num_threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--threads",
            metavar="N",
            min=1,
            help="Threads per torch operation in each process, unless OMP_NUM_THREADS is set. "
            "[dim]default: processors / processes[/]",
            show_default=False,
        ),
    ] = None,
    grace_s: Annotated[
        float,
        typer.Option("--grace", metavar="S", min=0.0, help="Seconds to wait for a process to exit before killing it."),
    ] = 5.0,
) -> None:
    """Run a program in several processes on this machine.

    Each process knows its rank from its environment: [bold]init_rpc[/], [bold]Cluster.from_env()[/] and
    torch.distributed find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT there. The output of each process
    is prefixed with its rank.

    If one fails, the others are stopped. All are stopped on Ctrl-C, and if this command dies for any reason.

    [bold]Examples[/]

      gradwire run -n 4 train.py --epochs 3
      gradwire run -n 2 -m my_package.train
    """
    from gradwire.cli.console import say_note
    from gradwire.cluster.rank_processes import RunOptions, python_command, run_ranks, threads_for

    if not is_module:
        _check_exists(program)
    options = RunOptions(
        command=python_command(program, args or [], is_module=is_module),
        num_ranks=num_ranks,
        num_threads=num_threads or threads_for(num_ranks),
        grace_s=grace_s,
    )
    raise typer.Exit(run_ranks(options, lambda text: say_note(text, "gradwire run", "bold red")))


@_command(
    app,
    context_settings=_PROGRAM_SETTINGS,
    epilog="Exit code: that of the program; 2 usage error. The same as `python -m gradwire.compat`.",
)
def compat(program: _Program, args: _Arguments = None, is_module: _IsModule = False) -> None:
    """Run an unmodified torch program on gradwire.

    Replaces torch.distributed.rpc, .autograd, .optim, ._shard and .nn.RemoteModule with gradwire in the program and in
    every process it starts.

    [bold]Examples[/]

      gradwire compat train.py --epochs 3
      gradwire compat -m pytest tests/
    """
    if not is_module:
        _check_exists(program)
    command = [sys.executable, "-m", "gradwire.compat", *(["-m"] if is_module else []), program, *(args or [])]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _check_exists(program: str) -> None:
    if not os.path.exists(program):
        raise typer.BadParameter(f"no such file: {program}", param_hint="PROGRAM")


@_command(app, epilog=_EXIT_CODES)
def status(
    cluster: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="CLUSTER",
            help="Name of a cluster, a prefix of it, or the driver's process id.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch, one line per update.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep updating until the cluster is closed, or Ctrl-C.")
    ] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="S", min=0.1, help="Seconds between updates with --watch.")
    ] = 1.0,
) -> None:
    """Show the clusters that you have open on this machine, or the workers of one.

    [bold]Examples[/]

      gradwire status
      gradwire status train-4711 --watch
    """
    from gradwire.cli.status_view import show_status, watch_status

    if watch:
        watch_status(cluster, interval_s, as_json=as_json)
    else:
        show_status(cluster, as_json=as_json)


_Cluster = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="CLUSTER",
        help="Name of a cluster, a prefix of it, or the driver's process id; not needed if you have only one open.",
        show_default=False,
    ),
]


@_command(app, epilog=_EXIT_CODES)
def top(
    cluster: _Cluster = None,
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="S", min=0.1, help="Seconds between updates.")
    ] = 1.0,
) -> None:
    """Show the workers, calls and backward passes of a running cluster, live; q quits.

    If the output is not a terminal, it is shown once.

    [bold]Examples[/]

      gradwire top
      gradwire top train-4711 --interval 0.5
    """
    from gradwire.cli.top import show_top

    show_top(cluster, interval_s)


@_command(app, epilog=_EXIT_CODES)
def dashboard(
    cluster: _Cluster = None,
    opens_browser: Annotated[bool, typer.Option("--open", help="Open the link in a browser.")] = False,
) -> None:
    """Print a link to the dashboard of a running cluster: workers, graph, timeline, errors, references, stacks.

    The driver of the cluster serves the page, on this machine alone. Each link works once.

    [bold]Examples[/]

      gradwire dashboard
      gradwire dashboard train-4711 --open
    """
    from gradwire.cli.driver_operations import show_link

    show_link(cluster, opens_browser=opens_browser)


@_command(app, epilog=_EXIT_CODES)
def trace(
    cluster: _Cluster = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="[bold].zip[/] or .pftrace for Perfetto, .json for Chrome's format."
        ),
    ] = Path("trace.zip"),
    seconds: Annotated[
        float, typer.Option("--seconds", "-s", metavar="S", min=0.001, max=86_400, help="How long to record.")
    ] = 10.0,
    profile: Annotated[bool, typer.Option("--profile", help="Record the operators of torch as well.")] = False,
    max_events: Annotated[
        int,
        typer.Option(
            "--max-events",
            metavar="N",
            min=1,
            help="Maximum number of events kept per worker; the oldest are dropped.",
        ),
    ] = 200_000,
) -> None:
    """Record what happens on all workers of a running cluster, as one timeline.

    Open the file in the Perfetto UI, https://ui.perfetto.dev, which reads it in the browser.

    [bold]Examples[/]

      gradwire trace
      gradwire trace train-4711 --seconds 3 --profile -o step.zip
    """
    from gradwire.cli.driver_operations import record_trace

    record_trace(cluster, output, seconds, profile=profile, max_events=max_events)


@_command(app, epilog="Exit codes: 0 if nothing failed (there may be warnings), 1 if something did, 130 Ctrl-C.")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    self_test: Annotated[bool, typer.Option(help="Start a worker, call it and compare a gradient.")] = True,
) -> None:
    """Check whether this machine and Python installation can run gradwire, and suggest fixes for problems."""
    from gradwire.cli.doctor import show_findings

    raise typer.Exit(show_findings(as_json=as_json, with_self_test=self_test))


_Days = Annotated[int, typer.Option(metavar="N", min=1, help="How long a certificate is valid.")]
_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Created with mode 0700 if it does not exist.")]
_WorkerName = Annotated[
    str, typer.Option("--name", help="Name of the worker; [bold]worker[/] stands for all of them.", show_default=False)
]


@_command(keys)
def init(
    folder: _Folder,
    names: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--name",
            help="Name of a worker; may be repeated. [dim]default: a single certificate, valid for every worker[/]",
        ),
    ] = None,
    days: _Days = 365,
) -> None:
    """Create the keys of a cluster: an authority, and a certificate and key for each name.

    An authority that already exists in the folder is reused: run this again to add workers or renew certificates.

    [bold]Examples[/]

      gradwire keys init keys/
      gradwire keys init keys/ --name ps --name trainer0 --name trainer1
    """
    from gradwire.cli.keys import init_keys

    init_keys(folder, names or ["worker"], days)


@_command(keys)
def request(folder: _Folder, name: _WorkerName) -> None:
    """Create a key on the machine where a worker will run, and a request for the holder of the authority to sign.

    The private key does not leave this machine.

    [bold]Example[/]

      gradwire keys request keys/ --name trainer0
    """
    from gradwire.cli.keys import request_certificate

    request_certificate(folder, name)


@_command(keys)
def sign(
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="The file written by `gradwire keys request`.")],
    name: _WorkerName,
    folder: Annotated[Path, typer.Option("--keys", help="Folder of the authority.", show_default=False)],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--output",
            "-o",
            help="Where to write the certificate. [dim]default: REQUEST with .pem[/]",
            show_default=False,
        ),
    ] = None,
    days: _Days = 365,
) -> None:
    """Sign a certificate request; --name decides which worker the certificate is valid for.

    Compare the fingerprint with the one that `gradwire keys request` showed on the other machine.

    [bold]Example[/]

      gradwire keys sign trainer0.csr --name trainer0 --keys keys/
    """
    from gradwire.cli.keys import sign_certificate

    sign_certificate(folder, request, name, output or request.with_suffix(".pem"), days)


@_command(keys)
def show(
    paths: Annotated[list[Path], typer.Argument(metavar="PATHS", help="Certificates, or folders that contain them.")],
) -> None:
    """Show which workers certificates are valid for, their expiry dates and fingerprints.

    Exits with 1 if one of them has expired or was not signed by the ca.pem beside it.
    """
    from gradwire.cli.keys import show_certificates

    raise typer.Exit(show_certificates(paths))


@_command(keys)
def secret(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to create, with mode 0600; it must not exist.")],
) -> None:
    """Create a random secret, shared by all ranks of a `Cluster.from_env()` that spans several machines.

    [bold]Example[/]

      gradwire keys secret ~/.gradwire-secret
      export GRADWIRE_SECRET_FILE=~/.gradwire-secret
    """
    from gradwire.cli.keys import make_secret

    make_secret(file)
