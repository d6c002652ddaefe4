"""Data files of the regression sets: as described, downloaded once, refused when damaged."""

import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from experiments import datasets
from experiments.datasets import DataError, find_file, load_regression


@pytest.mark.parametrize("name", list(datasets.REGRESSION))
def test_data_files_are_as_described(name):
    try:
        x, y = load_regression(name)
    except DataError:
        pytest.skip("no data root and no network")
    file = datasets.REGRESSION[name]
    assert x.shape == (file.rows, file.columns - 1)
    assert y.shape == (file.rows, 1)
    assert torch.isfinite(x).all()


CONTENT = gzip.compress(b"1,2\n3,4\n", mtime=0)
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A real HTTP server; `server.mode` says how it answers, `server.requests` counts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYRO_DAK_DATA", raising=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.requests += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            if self.server.mode == "interrupted":
                self.wfile.write(CONTENT[: len(CONTENT) // 2])
                self.wfile.flush()
                self.connection.close()
            else:
                body = CONTENT if self.server.mode == "good" else CONTENT[::-1]
                self.wfile.write(body)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.mode, http.requests = "good", 0
    http.url = f"http://127.0.0.1:{http.server_port}/data.csv.gz"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield http
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_download_is_made_once(server):
    path = find_file("uci/tiny.csv.gz", SHA, server.url)
    assert path.read_bytes() == CONTENT
    assert find_file("uci/tiny.csv.gz", SHA, server.url) == path
    assert server.requests == 1


@pytest.mark.parametrize("mode", ["altered", "interrupted"])
def test_a_bad_download_is_refused_and_leaves_nothing(server, tmp_path, mode):
    server.mode = mode
    with pytest.raises(DataError, match=r"tiny\.csv\.gz.*could not be downloaded"):
        find_file("uci/tiny.csv.gz", SHA, server.url)
    left = [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.stat().st_size]
    assert left == []
    server.mode = "good"
    assert find_file("uci/tiny.csv.gz", SHA, server.url).read_bytes() == CONTENT


def test_a_damaged_file_in_the_data_root_is_named(tmp_path):
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci/tiny.csv.gz").write_bytes(CONTENT[:-1])
    with pytest.raises(DataError, match=r"uci/tiny\.csv\.gz: is damaged"):
        find_file("uci/tiny.csv.gz", SHA, "http://127.0.0.1:9/none", tmp_path)
