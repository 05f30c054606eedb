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
    (folder / "mixing.svg").mkdir()
    return folder


@pytest.fixture
def server(folder: Path):
    with ReportServer(folder) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def request(server: ReportServer, path: str, method: str = "GET", host: str = "127.0.0.1:PORT"):
    """Send a request, and return the status, the headers and the content of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host.replace("PORT", str(server.server_port)))
    connection.endheaders()
    with connection.getresponse() as answer:
        result = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return result


def test_the_files_of_the_report_are_served_with_their_types(server, folder):
    for path, kind in {
        "report.html": "text/html",
        "report.html?x=1": "text/html",
        "": "text/html",
        "inspection.json": "application/json",
        "sinks.svg": "image/svg+xml",
        "sinks.png": "image/png",
        "sublayers.csv": "text/csv",
    }.items():
        status, headers, content = request(server, f"/{path}")
        name = path.partition("?")[0] or "report.html"
        assert (status, headers["Content-type"], content) == (200, kind, (folder / name).read_bytes())
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Frame-Options"] == "DENY"
        assert request(server, f"/{path}", "HEAD")[2] == b""


@pytest.mark.parametrize(
    "path",
    [
        *("/customers.csv", "/me.png", "/.env", "/.git/", "/.git/config", "/./", "/x", "/report.html/"),
        *("/magnitudes.png", "/magnitudes.svg", "/mixing.svg", "/interventions.png"),
        *("/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//etc/passwd", "/report/../.env"),
    ],
)
def test_other_files_are_not_served(server, path):
    status, _, content = request(server, path)
    assert status == 404 and b"secret" not in content


def test_a_request_for_another_host_is_rejected(server):
    """Otherwise, a web page whose host name leads to this machine could read the report."""
    assert request(server, "/report.html", host="LocalHost:PORT")[0] == 200
    for host in ("evil.example:PORT", "evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:PORT", ""):
        status, _, content = request(server, "/report.html", host=host)
        assert status == 404 and b"page" not in content


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_methods_that_write_are_rejected(server, method):
    assert request(server, "/report.html", method)[0] == 501


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
