"""`examples/serve.py` as a process of its own, on loopback: answers, refusals, load, memory."""

import http.client
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import uvicorn

from pyro_dak import DAKAdditiveRegressor
from pyro_dak.tables.files import TableError
from pyro_dak.tables.predictive import StudentPrediction
from pyro_dak.tables.schema import Columns

ROOT = Path(__file__).parents[1]


def start(model, *options):
    """The process of a server and its port, when it answers."""
    command = [sys.executable, "examples/serve.py", str(model), "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("Serving on port "):
            return process, int(line.split()[-1])
    raise AssertionError("the server has ended")


def stop(process):
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM), output
    assert "Traceback" not in output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An exported model of two numbers, a colour and a date."""
    torch.set_default_dtype(torch.float32)
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"a": rng.normal(size=200), "b": rng.normal(size=200)})
    X["colour"] = rng.choice(["red", "green"], 200)
    X["when"] = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, 200), unit="D")
    estimator = DAKAdditiveRegressor().fit(X, X["a"] + (X["colour"] == "red"))
    path = tmp_path_factory.mktemp("serve") / "model.onnx"
    estimator.export(path, x=X)
    return estimator, X, path


@pytest.fixture(scope="module")
def server(model):
    process, port = start(model[2])
    yield process, port
    stop(process)


def ask(port, method, path, body=None, connection=None):
    """Status, headers and content of an answer."""
    own = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    own.request(method, path, body, {"Content-Type": "application/json"})
    response = own.getresponse()
    content = response.read()
    if connection is None:
        own.close()
    return response.status, response.headers, json.loads(content)


def rows_of(X, number):
    return json.loads(X[:number].to_json(orient="records", date_format="iso"))


def test_answers_are_predictions(server, model):
    estimator, X, _ = model
    records = rows_of(X, 5)
    status, _, many = ask(server[1], "POST", "/predict", json.dumps({"rows": records}))
    assert status == 200
    wanted = estimator.predict_dist(X[:5])
    for name in ("mean", "std"):
        found = [row[name] for row in many["predictions"]]
        np.testing.assert_allclose(found, getattr(wanted, name), rtol=1e-5)
    for one in ({"row": records[0]}, {"row": [*records[0].values()]}):
        status, _, single = ask(server[1], "POST", "/predict", json.dumps(one))
        assert status == 200
        assert single["predictions"][0]["mean"] == pytest.approx(many["predictions"][0]["mean"])
    status, _, health = ask(server[1], "GET", "/health")
    assert (status, health["status"], health["columns"]) == (200, "ok", [*X.columns])


DATES = ["2020-02-29", "2020-02-29T13:30:00+02:00", "20210301", "2250-01-01", None]


def test_dates_are_those_of_a_table(server, model):
    estimator, X, _ = model
    records = [record | {"when": date} for record in rows_of(X, 1) for date in DATES]
    status, _, content = ask(server[1], "POST", "/predict", json.dumps({"rows": records}))
    assert status == 200
    wanted = estimator.predict_dist(pd.DataFrame(records))
    for name in ("mean", "std"):
        found = [row[name] for row in content["predictions"]]
        np.testing.assert_allclose(found, getattr(wanted, name), rtol=1e-5)
    assert len({row["mean"] for row in content["predictions"][:3]}) == 3


ROW = {"a": 1.0, "b": 2.0, "colour": "red", "when": "2020-05-01"}


def row(**change):
    return json.dumps({"row": ROW | change}).encode()


TWO = b'1, "red", "2020-05-01"]}'  # the end of a row
REFUSED = {
    "nothing": (b"", 400, "not JSON"),
    "no JSON": (b"{rows: 1}", 400, "not JSON"),
    "no text": (b"\xff\xfe\x00", 400, "not JSON"),
    "NaN": (b'{"row": [NaN, ' + TWO, 400, "write null"),
    "infinity": (b'{"row": [-Infinity, ' + TWO, 400, "write null"),
    "deep": (b"[" * 100_000, 400, "not JSON"),
    "many digits": (b'{"row": [' + b"9" * 5000 + b", " + TWO, 400, "not JSON"),
    "a list": (b"[]", 422, "must be"),
    "other key": (b'{"data": []}', 422, "must be"),
    "no rows": (b'{"rows": []}', 422, "1 to 1000"),
    "too many rows": (json.dumps({"rows": [[0, 0, "red", None]] * 1001}).encode(), 422, "1 to"),
    "very many rows": (b'{"rows": [' + b"1," * 500_000 + b"1]}", 422, "1 to 1000 rows; got 500001"),
    "rows are no list": (b'{"rows": "all"}', 422, "1 to 1000"),
    "a number": (b'{"rows": [3]}', 422, "row 0: must be an object or a list"),
    "no row": (b'{"row": null}', 422, "row 0: must be an object or a list"),
    "short": (b'{"row": [1, 2]}', 422, "has 2 values, expected 4"),
    "text": (row(a="x"), 422, "`a` must be a number"),
    "long text": (row(a="1" * 10**6), 422, "`a` must be a number; got '111"),
    "a list in it": (row(a=[[]]), 422, "`a` must be a number; got a list"),
    "too large": (b'{"row": [1e999, ' + TWO, 422, "`a` must be a finite number"),
    "large": (b'{"row": [1' + b"0" * 400 + b", " + TWO, 422, "`a` must be a finite number"),
    "nearly too large": (row(a=-1.7e308), 422, "too large to compute with"),
    "unknown": (row(colour="pink"), 422, "no category 'pink'"),
    "infinite": (b'{"row": [1, 2, 1e999, null]}', 422, "no category inf"),
    "long": (row(colour="x" * 10**6), 422, "no category 'xxx"),
    "half a character": (rb'{"row": [1, 2, "\ud800", null]}', 422, r"no category '\ud800'"),
    "an object": (row(colour={"a": 1}), 422, "must be a text or a number; got a dict"),
    "no date": (row(when="soon"), 422, "`when` must be a date, as 2026-01-31; got 'soon'"),
    "no day": (row(when="2021-02-29"), 422, "`when` must be a date"),
    "day first": (row(when="01/02/2020"), 422, "`when` must be a date"),
    "not a time": (row(when="NaT"), 422, "`when` must be a date"),
    "a number of days": (row(when=1577836800000), 422, "`when` must be a date"),
    "year": (row(when="99999-01-01"), 422, "`when` must be a date"),
    "long date": (row(when="2" * 10**6), 422, "`when` must be a date"),
    "half a date": (rb'{"row": [1, 2, "red", "\ud800"]}', 422, "`when` must be a date"),
    "column": (row(c=1), 422, "unknown ones ['c']"),
    "lacks": (b'{"row": {"a": 1}}', 422, "lacks the columns ['b', 'colour', 'when']"),
    "many bytes": (b" " * (2**20 + 1), 413, "at most 1048576 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_bodies_get_a_reason(server, name):
    body, wanted, reason = REFUSED[name]
    status, _, content = ask(server[1], "POST", "/predict", body)
    assert status == wanted
    assert reason in content["detail"]


@pytest.mark.parametrize("value", ["{}", '{{"a": {}}}'])
def test_no_depth_is_too_deep_to_be_refused(server, value):
    for depth in (100, 900, 950, 960, 970, 980, 990, 1000, 3000, 10_000, 90_000):
        nested = value.format("[" * depth + "]" * depth)
        for column in ("a", "colour", "when"):
            body = json.dumps({"row": ROW | {column: 0}}).replace(": 0", f": {nested}")
            status, _, content = ask(server[1], "POST", "/predict", body)
            assert status in (400, 422)
            assert "nested" in content["detail"] or f"`{column}` must be" in content["detail"]


def test_a_client_that_hangs_up_does_no_harm(server):
    for sent in (b"", b'{"row": '):
        with socket.create_connection(("127.0.0.1", server[1])) as client:
            client.sendall(
                b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n" + sent
            )
    assert ask(server[1], "GET", "/health")[0] == 200


def test_other_paths_and_methods_are_client_errors(server):
    assert ask(server[1], "GET", "/predict")[0] == 405
    assert ask(server[1], "GET", "/elsewhere")[0] == 404


def load(port, body, seconds, results):
    """Ask again and again on one connection; latencies, and statuses other than 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    latencies, others = [], []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter()
        status, _, _ = ask(port, "POST", "/predict", body, connection)
        latencies.append(time.perf_counter() - begin)
        others += [] if status == 200 else [status]
    results.put((latencies, others))


def under_load(port, body, seconds, num_clients=2):
    """All latencies of several client processes, and statuses other than 200."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    clients = [
        context.Process(target=load, args=(port, body, seconds, results))
        for _ in range(num_clients)
    ]
    for client in clients:
        client.start()
    parts = [results.get(timeout=seconds + 120) for _ in clients]
    for client in clients:
        client.join()
    return [x for own, _ in parts for x in own], [x for _, own in parts for x in own]


def megabytes(process):
    """What a process holds in memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def check_load(server, X, seconds, num_rows):
    process, port = server
    body = json.dumps({"rows": rows_of(X, num_rows)})
    under_load(port, body, seconds / 5)  # so that all buffers are there
    before = megabytes(process)
    latencies, others = under_load(port, body, seconds)
    after = megabytes(process)
    p50, p99 = (1e3 * q for q in np.quantile(latencies, [0.5, 0.99]))
    print(
        f"\n{num_rows} rows a request, 2 clients, {seconds} s: {len(latencies)} requests, "
        f"{num_rows * len(latencies) / seconds:.0f} rows/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
        f"memory {before:.1f} -> {after:.1f} MB"
    )
    assert others == []
    assert len(latencies) > 10
    assert after < before + 8


def test_load_of_some_seconds(server, model):
    check_load(server, model[1], seconds=3, num_rows=1)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 100])
def test_load_of_half_a_minute(server, model, num_rows):
    check_load(server, model[1], seconds=30, num_rows=num_rows)


class Slow:
    """A model that takes its time."""

    classes_, has_intervals, facts, columns_ = None, True, {}, Columns(["a"], {"a": 0.0})

    def raw_of_records(self, records, allow_unknown):
        return np.array(records, dtype=float)

    def predict_raw(self, raw):
        if np.isnan(raw).any() or (raw > 10).any():
            raise TableError("has values that are too large to compute with.")
        time.sleep(0.5)
        return StudentPrediction(raw[:, 0], raw[:, 0], raw[:, 0])


@contextmanager
def slow_server(waiting):
    """The port of a server of the slow model in this process, with a queue of this length."""
    spec = importlib.util.spec_from_file_location("serve", ROOT / "examples" / "serve.py")
    serve = importlib.util.module_from_spec(spec)
    sys.modules["serve"] = serve  # where dataclasses look for it
    spec.loader.exec_module(serve)
    app = serve.create_app(Slow(), serve.Limits(waiting=waiting), 0.9, False)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()
    del sys.modules["serve"]


def answers_of(port, bodies):
    """Status, headers and content of requests that are all sent before an answer is read."""
    connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in bodies]
    for connection, body in zip(connections, bodies, strict=True):
        connection.request("POST", "/predict", body)
    answers = [connection.getresponse() for connection in connections]
    found = [(answer.status, answer.headers, json.loads(answer.read())) for answer in answers]
    for connection in connections:
        connection.close()
    return found


def test_a_full_queue_says_when_to_come_again():
    with slow_server(waiting=1) as port:
        answers = answers_of(port, ['{"row": [1.0]}'] * 8)
    assert {status for status, _, _ in answers} == {200, 503}
    headers, content = next(rest for status, *rest in answers if status == 503)
    assert headers["Retry-After"] == "1"
    assert "try again" in content["detail"]


def test_a_bad_row_spoils_no_other_request():
    with slow_server(waiting=8) as port:
        answers = answers_of(port, ['{"row": [1.0]}', '{"row": [11.0]}', '{"row": [2.0]}'])
    assert [status for status, _, _ in answers] == [200, 422, 200]
    assert "too large" in answers[1][2]["detail"]
