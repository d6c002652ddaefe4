"""Serve a model of tables over HTTP: an exported file, or a saved model, exported at the start.

    pip install 'pyro_dak[serve]'
    python examples/serve.py model.onnx --port 8000
    curl localhost:8000/predict -d '{"rows": [{"age": 61, "sex": "f"}]}'

POST /predict takes {"rows": [...]} or {"row": ...}, where a row is an object by column or a list in
the order of the columns, with null for a missing value and dates as "2026-01-31" or with a time, as
in ISO 8601. The answer has a prediction for each row.
GET /health says what is served, and how many requests wait. Requests wait in a queue that holds a
limited number of them, and are predicted together; when it is full the answer is 503.
"""

import argparse
import asyncio
import json
import math
import socket
import tempfile
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from pyro_dak import DAKAdditiveClassifier, DAKAdditiveRegressor, DAKClassifier, DAKRegressor
from pyro_dak.tables.additive_files import stored_name
from pyro_dak.tables.exported import ExportedTable, prediction_columns, read_table_model
from pyro_dak.tables.files import TableError

ESTIMATORS = (DAKAdditiveClassifier, DAKAdditiveRegressor, DAKClassifier, DAKRegressor)


@dataclass
class Limits:
    """How much is taken: rows and bytes of a request, requests that wait, rows of one pass."""

    rows: int = 1000
    num_bytes: int = 2**20
    waiting: int = 64
    rows_of_pass: int = 4096


def open_model(path: Path, num_threads: int) -> ExportedTable:
    """The model at a path; a saved estimator is exported, which compares the two."""
    if not path.is_dir():
        return read_table_model(path, num_threads=num_threads)
    name = stored_name(path)
    classes = {cls.__name__: cls for cls in ESTIMATORS}
    if name not in classes:
        raise SystemExit(f"{path} holds no estimator; export the model, and serve the file.")
    with tempfile.TemporaryDirectory() as directory:
        report = classes[name].load(path).export(Path(directory) / "model.onnx")
        print(report, flush=True)
        return read_table_model(report.path, num_threads=num_threads)


def parsed(body: bytes, max_rows: int) -> list[Any]:
    """The rows of a request, or an HTTPException that says what is wrong with it."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no number of JSON; write null for a missing value")

    try:
        content = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise HTTPException(400, f"The body is not JSON: {reason}.") from None
    if not isinstance(content, dict) or content.keys() not in ({"rows"}, {"row"}):
        raise HTTPException(422, 'The body must be {"rows": [...]} or {"row": ...}.')
    rows = content.get("rows", [content.get("row")])
    if not isinstance(rows, list) or not 1 <= len(rows) <= max_rows:
        number = len(rows) if isinstance(rows, list) else type(rows).__name__
        raise HTTPException(422, f"`rows` must be a list of 1 to {max_rows} rows; got {number}.")
    return rows


def answer(columns: dict[str, np.ndarray], part: slice) -> list[dict[str, Any]]:
    """The predictions of some rows as objects of JSON."""
    lists = {name: values[part].tolist() for name, values in columns.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def create_app(model: ExportedTable, limits: Limits, level: float, allow_unknown: bool) -> FastAPI:
    """The application that serves a model."""
    waiting: asyncio.Queue[tuple[np.ndarray, asyncio.Future[Any]]] = asyncio.Queue(limits.waiting)

    def predict(raw: np.ndarray) -> dict[str, np.ndarray]:
        prediction = model.predict_raw(raw)
        return prediction_columns(prediction, model.classes_, level, model.has_intervals)

    async def work() -> None:
        """Predict what waits, all requests that fit into one pass together."""
        while True:
            batch = [await waiting.get()]
            while not waiting.empty() and sum(len(r) for r, _ in batch) < limits.rows_of_pass:
                batch.append(waiting.get_nowait())
            try:
                columns = await asyncio.to_thread(predict, np.concatenate([r for r, _ in batch]))
            except Exception:  # one of them may be to blame: each by itself
                for raw, future in batch:
                    await one_by_itself(raw, future)
                continue
            start = 0
            for raw, future in batch:
                if not future.done():
                    future.set_result(answer(columns, slice(start, start + len(raw))))
                start += len(raw)

    async def one_by_itself(raw: np.ndarray, future: "asyncio.Future[Any]") -> None:
        try:
            result = answer(await asyncio.to_thread(predict, raw), slice(None))
        except Exception as error:
            if not future.done():
                future.set_exception(error)
            return
        if not future.done():
            future.set_result(result)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        worker = asyncio.create_task(work())
        yield
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker

    app = FastAPI(title="pyro_dak", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        kept = ("kind", "task", "target", "fingerprint", "pyro_dak")
        facts = {name: model.facts.get(name) for name in kept}
        columns = list(model.columns_.names)
        return {"status": "ok", "waiting": waiting.qsize(), "columns": columns, **facts}

    @app.post("/predict")
    async def serve(request: Request) -> JSONResponse:
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.num_bytes:
                    reason = f"The body must have at most {limits.num_bytes} bytes."
                    raise HTTPException(413, reason)
        except ClientDisconnect:
            raise HTTPException(400, "The body has ended too early.") from None
        rows = parsed(bytes(body), limits.rows)
        try:
            raw = model.raw_of_records(rows, allow_unknown)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            waiting.put_nowait((raw, future))
            return JSONResponse({"predictions": without_nan(await future)})
        except TableError as error:
            raise HTTPException(422, str(error)) from None
        except asyncio.QueueFull:
            reason = f"{limits.waiting} requests wait already; try again."
            raise HTTPException(503, reason, headers={"Retry-After": "1"}) from None

    return app


def without_nan(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows with null for what is not finite, which JSON has no word for."""
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[name] = None
    return rows


def main() -> None:
    """Serve the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--threads", type=int, default=1, help="threads of a prediction")
    parser.add_argument("--level", type=float, default=0.9, help="probability of the interval")
    parser.add_argument("--max-rows", type=int, default=Limits.rows, help="rows of a request")
    parser.add_argument("--queue", type=int, default=Limits.waiting, help="requests that wait")
    parser.add_argument("--allow-unknown", action="store_true", help="take unknown categories")
    options = parser.parse_args()
    limits = Limits(rows=options.max_rows, waiting=options.queue)
    model = open_model(options.model, options.threads)
    app = create_app(model, limits, options.level, options.allow_unknown)
    with socket.create_server((options.host, options.port)) as listener:
        # Else the end of an answer waits for the client, 40 ms, to confirm the beginning.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(f"Serving on port {listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, access_log=False, log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
