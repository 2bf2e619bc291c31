"""A rate-limited network on one machine: a namespace per rank, joined by a switch.

Each rank has a network namespace with one end of a veth pair; the other end is a port of a bridge
in a namespace of its own. Both ends of every pair pass a token bucket (``tc ... tbf``), so a rank
sends and receives at most at the given rate, at once, as through a full-duplex network card.

Names hold the id of the process that made them. What a killed run has left behind is removed at
the next start; what a run makes is removed when it ends, whatever ends it. Refused
(``NetworkError``): a user without root's rights, a machine without ``ip`` or ``tc``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns what it printed; raises `NetworkError` if it fails."""

UNLIMITED = 0
"""The rate (Mbit/s) that means no limit."""
INTERFACE = "veth0"
"""The network card of a rank, as it is called in the rank's namespace."""
_PREFIX = "overlap-bench"
_SUBNET = "10.77.0"
# Two of the largest segments that the kernel hands to a card at once (64 KiB), so that the bucket
# does not cut them. What a pause saves up, 128 KiB, is 1 % of a second at 100 Mbit/s.
_BURST = "128kb"
# Longer than any queue that builds up here: TCP must see the rate, not losses.
_QUEUE = "16mb"


class NetworkError(RuntimeError):
    """The network cannot be made on this machine; the message says what to do."""


def run_command(command: Sequence[str]) -> str:
    """Runs `command` and returns what it printed.

    Raises:
        NetworkError: It failed; the message holds what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}; namespaces "
            f"need root with CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: run it privileged)"
        )
    return done.stdout


def check_rights() -> None:
    """Refuse before anything is made.

    Raises:
        NetworkError: No root, or a command is missing.
    """
    if os.geteuid() != 0:
        raise NetworkError(
            f"network namespaces need root, and this is user {os.geteuid()}; run it again under "
            f"sudo, with the same interpreter: sudo $(which python) benchmarks/loopback.py"
        )
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        raise NetworkError(
            f"no command {' and no '.join(missing)} on the path; install iproute2 (Debian, "
            f"Ubuntu: apt-get install iproute2)"
        )


class LoopbackNetwork:
    """The network of `num_ranks` ranks; a context that makes it and removes it.

    Args:
        num_ranks: 2 to 200.
        run: How commands are run; tests pass a recorder.
    """

    def __init__(self, num_ranks: int, run: Run = run_command) -> None:
        if not 2 <= num_ranks <= 200:
            raise ValueError(f"num_ranks must be 2 to 200, got {num_ranks}")
        self.num_ranks = num_ranks
        self._run = run
        self._switch = _namespace(os.getpid(), "switch")
        self._ranks = [_namespace(os.getpid(), f"rank{rank}") for rank in range(num_ranks)]

    def __enter__(self) -> LoopbackNetwork:
        remove_stale(self._run)
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @staticmethod
    def address(rank: int) -> str:
        """The IPv4 address of a rank."""
        return f"{_SUBNET}.{rank + 1}"

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        """`command` as it is run in the namespace of `rank`."""
        return ["ip", "netns", "exec", self._ranks[rank], *command]

    def limit(self, rate_mbit: int) -> None:
        """Limit every rank to `rate_mbit` (Mbit/s) each way; `UNLIMITED` lifts the limit."""
        for rank, namespace in enumerate(self._ranks):
            self._shape(namespace, INTERFACE, rate_mbit)
            self._shape(self._switch, _port(rank), rate_mbit)

    def _make(self) -> None:
        ip = _ip(self._run)
        for namespace in (self._switch, *self._ranks):
            ip("netns", "add", namespace)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self._switch, "link", "set", "switch", "up")
        for rank, namespace in enumerate(self._ranks):
            port = ("peer", "name", _port(rank), "netns", self._switch)
            ip("link", "add", INTERFACE, "netns", namespace, "type", "veth", *port)
            ip("-n", self._switch, "link", "set", _port(rank), "master", "switch", "up")
            ip("-n", namespace, "addr", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            ip("-n", namespace, "link", "set", INTERFACE, "up")
            ip("-n", namespace, "link", "set", "lo", "up")

    def _shape(self, namespace: str, interface: str, rate_mbit: int) -> None:
        tc = ["tc", "-n", namespace, "qdisc"]
        on = ["dev", interface, "root"]
        if rate_mbit == UNLIMITED:
            with suppress(NetworkError):  # there may be no limit to lift
                self._run([*tc, "del", *on])
            return
        bucket = ["tbf", "rate", f"{rate_mbit}mbit", "burst", _BURST, "limit", _QUEUE]
        self._run([*tc, "replace", *on, *bucket])

    def _remove(self) -> None:
        for namespace in (*self._ranks, self._switch):
            _delete(namespace, self._run)


def remove_stale(run: Run = run_command) -> list[str]:
    """Removes namespaces of runs that are no longer alive; returns their names."""
    listed = re.findall(rf"^({_PREFIX}-(\d+)-\w+)", run(["ip", "netns", "list"]), re.MULTILINE)
    stale = [name for name, pid in listed if not Path(f"/proc/{pid}").exists()]
    for name in stale:
        _delete(name, run)
    return stale


def _namespace(pid: int, role: str) -> str:
    return f"{_PREFIX}-{pid}-{role}"


def _port(rank: int) -> str:
    return f"port{rank}"


def _ip(run: Run) -> Callable[..., str]:
    return lambda *arguments: run(["ip", *arguments])


def _delete(namespace: str, run: Run) -> None:
    """Takes the links along; a namespace that was never made is no error."""
    with suppress(NetworkError):
        run(["ip", "netns", "delete", namespace])
