"""Two ranks with a link between them: the loopback device, or a rate-limited pair of devices between two network namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BURST = "128kb"
"""Above the largest packet that sockets hand down: below it, the kernel cuts all into 1,500 bytes by CPU, as no card does."""


@dataclass(frozen=True)
class Link:
    """How two processes are started so that they talk over a link."""

    label: str
    address: str
    """Of the first rank."""
    spaces: tuple[str, ...] = ()
    """Network namespaces, one a rank; none: this machine's own."""

    def command(self, rank: int, arguments: Sequence[str]) -> list[str]:
        """The command line of a rank."""
        if not self.spaces:
            return list(arguments)
        space = self.spaces[rank]
        return ["ip", "netns", "exec", space, "unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"', space, *arguments]

    def environment(self, rank: int) -> dict[str, str]:
        """The environment of a rank."""
        return {**os.environ, "GLOO_SOCKET_IFNAME": self.spaces[rank] if self.spaces else "lo"}


LOOPBACK = Link("loopback", "127.0.0.1")


@contextlib.contextmanager
def limited(rate_mbit: int) -> Iterator[tuple[Link | None, str]]:
    """A link of so many Mbit/s in each direction; None, and why, where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        yield None, "Network namespaces and tc are not available here: the rate-limited link was not run."
        return
    names = tuple(f"wt{os.getpid()}{c}" for c in "ab")
    commands = [
        *(f"ip netns add {n}" for n in names),
        f"ip link add {names[0]} type veth peer name {names[1]}",
        *(f"ip link set {n} netns {n}" for n in names),
        *(f"ip netns exec {n} ip addr add 10.99.77.{i + 1}/24 dev {n}" for i, n in enumerate(names)),
        *(f"ip netns exec {n} ip link set {d} up" for n in names for d in (n, "lo")),
        *(f"ip netns exec {n} tc qdisc add dev {n} root tbf rate {rate_mbit}mbit burst {_BURST} latency 400ms" for n in names),
    ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                yield None, f"Network namespaces are not allowed here ({done.stderr.strip()[:80]}): the link was not run."
                return
        yield Link(f"{rate_mbit / 1000:g} Gbit/s", "10.99.77.1", names), ""
    finally:
        for n in names:
            subprocess.run(["ip", "netns", "del", n], capture_output=True, check=False)
