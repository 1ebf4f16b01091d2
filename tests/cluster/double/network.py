"""Networks of the double: one bridge of the cluster, one per node, one network namespace per pod.

A node's bridge hangs on the cluster's bridge by one cable (a veth pair). Cutting the cable cuts the node off: its pods
still see one another, but neither the other nodes' pods nor the API server.
"""

import asyncio
import os
import random
import subprocess
from dataclasses import dataclass, field


class NetworkError(Exception):
    """`ip` refused a command."""


async def _ip(*batch: str, namespace: str = "", force: bool = False) -> None:
    command = ["ip", *(["-n", namespace] if namespace else []), *(["-force"] if force else []), "-batch", "-"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, errors = await process.communicate("\n".join(batch).encode())
    if process.returncode and not force:
        raise NetworkError(f"{batch}: {errors.decode()}")


@dataclass
class Network:
    """The bridges and addresses of one double (at most 30 nodes, 2,000 pods a node).

    Attributes:
        gateway: Address of the host on the cluster's bridge; pods reach the API server there.
        prefix: First two bytes of every address.
        tag: Distinguishes this double's interfaces and namespaces from another's.
    """

    prefix: str
    tag: str
    gateway: str = ""
    _next: dict[str, tuple[int, int]] = field(default_factory=dict)
    _pods: set[str] = field(default_factory=set)

    @classmethod
    async def create(cls, nodes: int) -> "Network":
        """Make the bridges of `nodes` nodes, in a free range of 10.64.0.0 - 10.127.255.255."""
        used = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
        free = [f"10.{number}" for number in range(64, 128) if f" 10.{number}." not in used]
        network = cls(random.choice(free), f"{os.getpid() % 0xFFFFF:05x}")
        network.gateway = f"{network.prefix}.0.1"
        names = [f"n{number + 1}" for number in range(nodes)]
        batch = [f"link add hd{network.tag} type bridge", f"addr add {network.gateway}/16 dev hd{network.tag}"]
        batch.append(f"link set hd{network.tag} up")
        for number, name in enumerate(names):
            bridge, cable = network._bridge(name), network._cable(name)
            batch += [f"link add {bridge} type bridge", f"link set {bridge} up"]
            batch += [f"link add {cable} type veth peer name {cable}u", f"link set {cable} master hd{network.tag} up"]
            batch += [f"link set {cable}u master {bridge} up"]
            network._next[name] = ((number + 1) * 8, 0)
        await _ip(*batch)
        return network

    def address(self, node: str) -> str:
        """The address of a node itself (nothing listens there)."""
        return f"{self.prefix}.0.{10 + int(node.removeprefix('n'))}"

    async def connect(self, node: str, name: str) -> str:
        """Make the namespace `name` on a node.

        Returns:
            Its address.
        """
        block, count = self._next[node]
        self._next[node] = (block, count + 1)
        address = f"{self.prefix}.{block + count // 250}.{2 + count % 250}"
        cable = f"hp{self.tag}{block + count // 250:02x}{2 + count % 250:02x}"
        self._pods.add(name)
        await _ip(
            f"netns add {name}",
            f"link add {cable} type veth peer name eth0 netns {name}",
            f"link set {cable} master {self._bridge(node)} up",
        )
        await _ip(
            "link set lo up",
            f"addr add {address}/16 dev eth0",
            "link set eth0 up",
            f"route add default via {self.gateway}",
            namespace=name,
        )
        return address

    async def disconnect(self, name: str) -> None:
        """Remove a pod's namespace, and with it the cable."""
        if name in self._pods:
            self._pods.discard(name)
            await _ip(f"netns del {name}", force=True)

    async def cut(self, node: str, cut: bool) -> None:
        """Pull a node's cable out, or put it back."""
        await _ip(f"link set {self._cable(node)} {'down' if cut else 'up'}")

    async def close(self) -> None:
        """Remove everything that was made."""
        for name in list(self._pods):
            await self.disconnect(name)
        batch = [f"link del hd{self.tag}"]
        for node in self._next:
            batch += [f"link del {self._cable(node)}", f"link del {self._bridge(node)}"]
        await _ip(*batch, force=True)

    def _bridge(self, node: str) -> str:
        return f"hd{self.tag}{node}"

    def _cable(self, node: str) -> str:
        return f"hc{self.tag}{node}"
