"""Two workers over TCP with TLS 1.3 on both sides, as between two machines; here both are on loopback.

    python examples/two_hosts_tls.py

On real machines: run `make_keys` once, on a machine of your own; copy `ca.pem` and one worker's two files to each host
(`ca.key` stays where it is); start the same program everywhere with `init_method="tcp://<host of rank 0>:<port>"`.
With keys the default is `trust="data"`, so the functions that others call are marked with `expose`.
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


@rpc.expose
def normalise(x: torch.Tensor) -> torch.Tensor:
    """Runs on the other machine."""
    return x / x.norm()


def run(rank: int, keys: str, port: int) -> None:
    """One worker. `transports` is only needed because both are on one machine, where unix would be chosen."""
    options = rpc.RpcOptions(
        init_method=f"tcp://127.0.0.1:{port}", init_timeout=60, tls=keys_for(keys, NAMES[rank]), transports=("tcp",)
    )
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=2, rpc_backend_options=options)
    other = NAMES[1 - rank]
    norm = rpc.rpc_sync(other, normalise, args=(torch.ones(1000),)).norm().item()
    print(f"{NAMES[rank]} called {other}: norm {norm:.3f}, trust {rpc.current_agent().trust}", flush=True)
    rpc.shutdown()


def main() -> None:
    """Makes keys and starts both workers."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        make_keys(keys, names=NAMES)
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
                program.kill()  # does nothing to one that has ended
    print(f"two_hosts_tls: both workers ended with {codes}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two workers over TLS.")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--keys")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.rank is None:
        main()
    else:
        run(options.rank, options.keys, options.port)
