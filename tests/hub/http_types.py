"""A request, an answer, and the table that says which function answers which request."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from repositories import Account, HubError


@dataclass
class Request:
    method: str
    target: str  # path and query, as sent
    headers: dict[str, str]
    body: bytes
    account: Account | None = None

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.target).query)

    @property
    def form(self) -> dict[str, list[str]]:
        return parse_qs(self.body.decode())

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body or b"{}")
        except ValueError as error:
            raise HubError(400, f"not JSON: {error}") from error


@dataclass
class Response:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object, status: int = 200, **headers: str) -> "Response":
        """An answer in JSON."""
        return cls(
            status,
            json.dumps(value, default=str).encode(),
            {"Content-Type": "application/json; charset=utf-8", **headers},
        )

    @classmethod
    def of_error(cls, error: HubError) -> "Response":
        """The error in the body and, as far as a header can hold it, in `X-Error-Message`."""
        line = " ".join(error.message.split()).encode("ascii", "replace").decode()
        return cls.of({"error": error.message}, error.status, **{"X-Error-Message": line, **error.headers})


Answer = Callable[..., Response]


class Routes:
    """Functions by method and path; what a group of the pattern matches is unquoted and passed by its name."""

    def __init__(self):
        self.routes: list[tuple[str, re.Pattern[str], Answer]] = []

    def __call__(self, method: str, pattern: str) -> Callable[[Answer], Answer]:
        def register(answer: Answer) -> Answer:
            self.routes.append((method, re.compile(pattern), answer))
            return answer

        return register

    def answer(self, hub: object, request: Request) -> Response:
        """The answer of the first route that fits. HEAD is a GET whose body is not sent.

        Raises:
            HubError: 404 if no route fits.
        """
        method = "GET" if request.method == "HEAD" else request.method
        for routed, pattern, answer in self.routes:
            if routed == method and (match := pattern.fullmatch(request.path)):
                groups = {name: unquote(value) if value else "" for name, value in match.groupdict().items()}
                return answer(hub, request, **groups)
        raise HubError(404, f"Sorry, we can't find the page you are looking for: {request.method} {request.path}")
