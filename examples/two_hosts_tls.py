"""
Connect two machines with TLS
=============================

Two workers talk over TCP with TLS 1.3. Each shows the other a certificate for its name, signed by the cluster's own
authority. Here both run on this machine, over the loopback interface.

Run it::

    python examples/two_hosts_tls.py

On real machines:

1. Run ``make_keys`` once, on a machine of your own. ``ca.key`` stays there.
2. Copy ``ca.pem`` and one worker's two files to each machine.
3. Start the same program on every machine with ``init_method="tcp://<host of rank 0>:<port>"``.

With keys the default is ``trust="data"``, so a function that others call is marked with ``expose``.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gradwire import rpc
from gradwire.transports.tls import keys_for, make_keys

NAMES = ("left", "right")

# %%
# One worker
# ----------
# ``transports`` is needed only because both workers are on one machine, where gradwire would choose Unix sockets.


@rpc.expose
def normalize(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm()


def run(rank: int, keys: str, port: int) -> None:
    name, peer = NAMES[rank], NAMES[1 - rank]
    options = rpc.RpcOptions(
        init_method=f"tcp://127.0.0.1:{port}", init_timeout=60, tls=keys_for(keys, name), transports=("tcp",)
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    norm = rpc.rpc_sync(peer, normalize, args=(torch.ones(1000),)).norm().item()
    print(f"{name} called {peer}: norm {norm:.3f}, trust {rpc.current_agent().trust!r}", flush=True)
    rpc.shutdown()


# %%
# Make the keys and start both workers
# ------------------------------------


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        make_keys(keys, names=NAMES)
        print("made keys:", *sorted(path.name for path in keys.iterdir()), flush=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        programs = [
            subprocess.Popen([sys.executable, __file__, "--rank", str(rank), "--keys", str(keys), "--port", str(port)])
            for rank in range(2)
        ]
        try:
            codes = [program.wait(timeout=60) for program in programs]
        finally:
            for program in programs:
                program.kill()  # has no effect on one that has exited
    if any(codes):
        raise SystemExit(f"two_hosts_tls: the workers exited with {codes}")
    print("two_hosts_tls: both workers called each other over TLS and have exited")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Connect two workers with TLS.")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--keys")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.rank is None:
        main()
    else:
        run(options.rank, options.keys, options.port)
