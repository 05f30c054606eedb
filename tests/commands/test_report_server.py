"""`attnres inspect --serve` serves only the files of a report, and only under this machine's own address."""

import http.client
import os
import sys
import threading
from pathlib import Path

import pytest

from attnres.commands.report_server import ReportServer

from .. import forks

WRITTEN = '{"written_by": "attnres inspect"}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a report and with other files."""
    (tmp_path / "secret.txt").write_text("secret")
    folder = tmp_path / "report"
    folder.mkdir()
    for name, content in {
        "report.html": "<p>page</p>",
        "inspection.json": WRITTEN,
        "sinks.svg": "<svg/>",
        "sinks.png": "png",
        "sublayers.csv": "a,b",
        "customers.csv": "secret",
        ".env": "secret",
        "me.png": "secret",
    }.items():
        (folder / name).write_text(content)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / "magnitudes.png").symlink_to(tmp_path / "secret.txt")
    (folder / "magnitudes.svg").symlink_to(folder / ".env")
    os.mkfifo(folder / "mixing.png")
    (folder / "mixing.svg").mkdir()
    return folder


@pytest.fixture
def server(folder: Path):
    with ReportServer(folder) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def request(server: ReportServer, path: str, method: str = "GET", hosts: tuple[str, ...] = ("127.0.0.1:PORT",)):
    """Send a request, and return the status, the headers and the content of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    for host in hosts:
        connection.putheader("Host", host.replace("PORT", str(server.server_port)))
    connection.endheaders()
    with connection.getresponse() as answer:
        result = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return result


def test_the_files_of_the_report_are_served_with_their_types(server):
    for name, kind in {
        "report.html": "text/html; charset=utf-8",
        "inspection.json": "application/json",
        "sinks.svg": "image/svg+xml",
        "sinks.png": "image/png",
        "sublayers.csv": "text/csv; charset=utf-8",
    }.items():
        status, headers, content = request(server, f"/{name}")
        assert (status, headers["Content-Type"], content) == (200, kind, (server.folder / name).read_bytes())
    assert request(server, "/report.html?x=1#y")[0] == 200
    status, headers, _ = request(server, "/")
    assert (status, headers["Location"]) == (302, "/report.html")


@pytest.mark.parametrize(
    "path",
    [
        *("/customers.csv", "/me.png", "/.env", "/.git/", "/.git/config", "/./", "/x", "/report.html/"),
        *("/magnitudes.png", "/magnitudes.svg", "/mixing.png", "/mixing.svg", "/interventions.png"),
        *("/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//etc/passwd", "/report/../.env"),
        *("secret.txt", "report.html", "http://127.0.0.1/report.html", "/report.html%00", "/REPORT.HTML"),
    ],
)
def test_other_files_are_not_served(server, path):
    status, _, content = request(server, path)
    assert (status, content) == (404, b"")


@pytest.mark.parametrize("host", ["127.0.0.1:PORT", "localhost:PORT", "LocalHost:PORT", "[::1]:PORT"])
def test_the_names_of_this_machine_are_answered(server, host):
    assert request(server, "/report.html", hosts=(host,))[0] == 200


@pytest.mark.parametrize(
    "hosts",
    [
        *(
            ("evil.example:PORT",),
            ("evil.example",),
            ("127.0.0.1",),
            ("127.0.0.1:1",),
            ("localhost.evil.example:PORT",),
        ),
        *((), ("",), ("127.0.0.1:PORT", "evil.example"), ("me@127.0.0.1:PORT",), ("127.0.0.1:PORT.evil.example",)),
    ],
)
def test_a_request_for_another_host_is_rejected(server, hosts):
    """Otherwise, a web page whose host name leads to this machine could read the report."""
    for path in ("/report.html", "/", "/x"):
        status, _, content = request(server, path, hosts=hosts)
        assert (status, content) == (421, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
def test_methods_that_write_are_rejected(server, method):
    status, headers, _ = request(server, "/report.html", method)
    assert status in (405, 501)
    assert not [name for name in headers if name.startswith("Access-Control")]


def test_head_returns_only_headers(server):
    get, head = request(server, "/sinks.svg"), request(server, "/sinks.svg", "HEAD")
    assert head[2] == b""
    assert {**get[1], "Date": ""} == {**head[1], "Date": ""}


def test_headers_keep_other_pages_out(server):
    for path in ("/report.html", "/sinks.svg", "/x"):
        headers = request(server, path)[1]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Python" not in headers["Server"]
    assert "sandbox" in request(server, "/sinks.svg")[1]["Content-Security-Policy"]


def test_a_folder_without_a_report_is_rejected(folder):
    (folder / "inspection.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="is no report of `attnres inspect`"):
        ReportServer(folder)
    (folder / "inspection.json").write_text(WRITTEN)
    (folder / "report.html").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no report\.html"):
        ReportServer(folder)
    (folder / "report.html").symlink_to(folder.parent / "secret.txt")
    with pytest.raises(FileNotFoundError, match="is a link"):
        ReportServer(folder)


def test_the_chosen_address_is_answered(folder):
    with ReportServer(folder, "127.0.0.2") as server:
        assert [f"127.0.0.2:{server.server_port}"] in server.hosts


def test_a_text_browser_gets_the_page_while_it_is_waited_for(folder, tmp_path):
    browser = tmp_path / "browser.py"
    browser.write_text(
        "import sys, urllib.request as http\n"
        "try:\n"
        "    print(http.build_opener(http.ProxyHandler({})).open(sys.argv[1], timeout=5).read().decode())\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    code = "import pathlib, sys\nfrom attnres.commands.report_server import serve\nserve(pathlib.Path(sys.argv[1]))"
    environment = os.environ | {"BROWSER": f"{sys.executable} {browser} %s"}
    with forks.start("-c", code, folder, env=environment) as process:
        assert process.stdout.readline().endswith("/report.html  (Ctrl-C ends it)\n")
        assert process.stdout.readline() == "<p>page</p>\n"
