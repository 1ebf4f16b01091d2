"""Start the double: `python -m tests.cluster.double --kubeconfig OUT [--fault FILE] [--time-scale 1.0] ...`."""

import argparse
import asyncio
import base64
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import uvicorn
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.cluster.double import controllers, discovery, kueue
from tests.cluster.double.access import Access
from tests.cluster.double.faults import Faults
from tests.cluster.double.network import Network
from tests.cluster.double.server import Server
from tests.cluster.double.store import RESOURCES, Clock, Store, stamp

_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
_NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")


class _Uvicorn(uvicorn.Server):
    """Uvicorn without signal handlers of its own: pods must be ended first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def _certificates(addresses: list[str], folder: Path) -> tuple[str, Path, Path]:
    """A certificate authority (PEM), and files of a server certificate and its key."""
    now = datetime.now(UTC)

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def builder(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        begun = x509.CertificateBuilder(name("kubernetes"), name(subject), key.public_key())
        begun = begun.serial_number(x509.random_serial_number())
        return begun.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))

    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    constraint = x509.BasicConstraints(ca=True, path_length=None)
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = builder("kubernetes", authority_key).add_extension(constraint, critical=True)
    authority = authority.add_extension(identifier, critical=False)
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    root = authority.add_extension(usage, critical=True).sign(authority_key, hashes.SHA256())
    hosts = [x509.DNSName(host) for host in _NAMES] + [x509.IPAddress(ipaddress.ip_address(a)) for a in addresses]
    leaf = builder("kube-apiserver", server_key).add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    signed = leaf.add_extension(signer, critical=False).sign(authority_key, hashes.SHA256())
    certificate, key = folder / "server.crt", folder / "server.key"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    key.touch(mode=0o600)
    key.write_bytes(server_key.private_bytes(*encoding))
    return root.public_bytes(serialization.Encoding.PEM).decode(), certificate, key


def _kubeconfig(server: str, authority: str, tokens: dict[str, str]) -> str:
    encoded = base64.b64encode(authority.encode()).decode()
    cluster = {"name": "double", "cluster": {"server": server, "certificate-authority-data": encoded}}
    users = [{"name": name, "user": {"token": token}} for name, token in tokens.items()]
    contexts = [{"name": name, "context": {"cluster": "double", "user": name}} for name in tokens]
    config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "users": users, "contexts": contexts}
    return yaml.safe_dump({**config, "current-context": "admin"})


def _sockets(addresses: list[str]) -> list[socket.socket]:
    """Listening sockets on one free port of every address."""
    while True:
        first = socket.create_server((addresses[0], 0), backlog=512)
        port, opened = first.getsockname()[1], [first]
        try:
            for address in addresses[1:]:
                opened.append(socket.create_server((address, port), backlog=512))
        except OSError:
            for one in opened:
                one.close()
            continue
        for one in opened:
            # asyncio does it for sockets of its own making only; without it every answer waits for a delayed ACK.
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return opened


async def _serve(arguments: argparse.Namespace, state: Path) -> None:
    store, faults = Store(Clock(arguments.time_scale)), Faults(arguments.fault)
    access = Access(store)
    tokens = {name: access.add_user(name) for name in ("admin", "alice")}
    network = await Network.create(arguments.nodes)
    addresses = ["127.0.0.1", *([network.gateway] if arguments.nodes else [])]
    sockets = _sockets(addresses)
    port = sockets[0].getsockname()[1]
    authority, certificate, key = _certificates(addresses, state)
    server = Server(store, access, faults)
    server.address = f"{addresses[0]}:{port}"
    options = controllers.Options(
        state=state,
        network=network,
        faults=faults,
        issue_token=access.issue,
        admit_pod=lambda pod: server.admit(RESOURCES["pods"], pod),
        ca_certificate=authority,
        api_port=port,
        nodes=arguments.nodes,
        kueue=arguments.kueue,
    )
    server.logs = options.logs
    if arguments.kueue:
        server.webhook = lambda verb, plural, new, old: kueue.admit(store, faults, verb, plural, new, old)
        for custom in (resource for resource in RESOURCES.values() if resource.custom):
            store.create("customresourcedefinitions", discovery.definition(custom, stamp(store.clock.now())))
    config = uvicorn.Config(
        server,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=3600,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = controllers.start_all(store, options)
    try:
        for name in _NAMESPACES:
            store.create("namespaces", server.admit(RESOURCES["namespaces"], {"metadata": {"name": name}}))
        running = _Uvicorn(config)
        serving = asyncio.create_task(running.serve(sockets))
        while not running.started and not serving.done():
            await asyncio.sleep(0.01)
        arguments.kubeconfig.touch(mode=0o600)
        arguments.kubeconfig.write_text(_kubeconfig(f"https://127.0.0.1:{port}", authority, tokens))
        print("ready", flush=True)
        _detach(state)
        others = [asyncio.create_task(one) for one in (_first_failure(tasks), _orphaned(), stop.wait())]
        await asyncio.wait([*others, serving], return_when=asyncio.FIRST_COMPLETED)
        for one in others:
            one.cancel()
        # Watches that are cut off now are no errors.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        running.should_exit = running.force_exit = True
        await serving
    finally:
        await controllers.stop_all(tasks, options)


def _detach(state: Path) -> None:
    """Never wait for a reader of errors: what goes to a pipe goes to a file from now on."""
    if stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode):
        with (state / "double.log").open("ab") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())


async def _orphaned() -> None:
    """Return when the process that started the double is gone (PR_SET_PDEATHSIG would watch a mere thread of it)."""
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(0.5)


async def _first_failure(tasks: list[asyncio.Task[None]]) -> None:
    """Return when a controller has died of an error, and say so."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        if not task.cancelled() and task.exception():
            logging.getLogger("double").error("%s died", task.get_name(), exc_info=task.exception())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.double", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True, help="file to write, with contexts admin and alice")
    parser.add_argument("--fault", type=Path, help="JSON file that says what is broken; read again when it changes")
    parser.add_argument("--time-scale", type=float, default=1.0, help="how many times faster the cluster's delays pass")
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes, n1, n2, ...")
    parser.add_argument("--kueue", action="store_true", help="install Kueue")
    parser.add_argument("--state", type=Path, help="folder for logs and files of pods; a temporary one by default")
    return parser.parse_args()


def main() -> None:
    """Run until SIGTERM."""
    arguments = _arguments()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="double-") as folder:
        state = arguments.state or Path(folder)
        state.mkdir(parents=True, exist_ok=True)
        asyncio.run(_serve(arguments, state))


if __name__ == "__main__":
    main()
