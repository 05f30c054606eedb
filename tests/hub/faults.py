"""What goes wrong on purpose, and the list of all requests that were made."""

import re
import threading
from dataclasses import asdict, dataclass, field


@dataclass
class Fault:
    """One kind of trouble for the requests whose path matches.

    kind:
        `status`: the request is answered with `status`, `headers` and `message`, and changes nothing.
        `cut`: the connection ends after `after_bytes` bytes, of what the client sends (PUT, POST) or else receives.
        `lost`: the request is carried out, and the connection ends before the answer.
        `slow`: the answer comes after `seconds`.
    path: regular expression, searched in the path with its query.
    method: of the requests that are meant; None for all.
    times: for how many requests; None for all.
    skip: how many requests that match pass unharmed before.
    reset: whether a connection ends with RST ("connection reset by peer") instead of FIN.
    """

    kind: str
    path: str = ""
    method: str | None = None
    times: int | None = 1
    skip: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "Internal Error - We're working hard to fix this as soon as possible!"
    after_bytes: int = 0
    reset: bool = False
    seconds: float = 0.0

    def __post_init__(self):
        if self.kind not in ("status", "cut", "lost", "slow"):
            raise ValueError(f"no such kind of fault: {self.kind}")


class Faults:
    """The faults to come, in the order in which they were asked for."""

    def __init__(self):
        self.lock = threading.Lock()
        self.pending: list[Fault] = []

    def add(self, fault: Fault) -> None:
        with self.lock:
            self.pending.append(fault)

    def clear(self) -> None:
        with self.lock:
            self.pending.clear()

    def take(self, method: str, path: str) -> Fault | None:
        """The fault that this request meets, if any."""
        with self.lock:
            for fault in self.pending:
                if fault.method in (None, method) and re.search(fault.path, path):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    if fault.times is not None:
                        fault.times -= 1
                        if fault.times == 0:
                            self.pending.remove(fault)
                    return fault
        return None


@dataclass
class Entry:
    """A request: `received` and `sent` count the bytes of bodies; `status` is None while there was no answer."""

    method: str
    path: str
    host: str  # "hub" or "storage"
    authorized: bool  # whether it carried a token of the Hub (the storage has tokens of its own)
    status: int | None = None
    received: int = 0
    sent: int = 0
    range: str | None = None
    fault: str | None = None


class Log:
    """The requests in the order of their arrival."""

    def __init__(self):
        self.entries: list[Entry] = []

    def clear(self) -> None:
        self.entries.clear()

    def as_json(self) -> list[dict]:
        return [asdict(entry) for entry in list(self.entries)]
