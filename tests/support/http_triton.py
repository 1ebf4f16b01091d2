"""Asks a server through tritonclient, in an environment that has it: prints what came back as JSON.

Run as `python http_triton.py HOST:PORT MODEL`; it is no part of the test environment.
"""

import json
import sys

import numpy as np
import tritonclient.http as triton  # pyright: ignore[reportMissingImports]
from tritonclient.utils import InferenceServerException  # pyright: ignore[reportMissingImports]

KEYS, SIZES, STARTS = ["a", "b", "nobody"], [1, 2, 9007199254740993], ["2026-03-05T13:00:00Z"] * 3


def main(address: str, model: str) -> None:
    client = triton.InferenceServerClient(address)
    said: dict[str, object] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "version_ready": client.is_model_ready(model, "1"),
        "server": client.get_server_metadata()["name"],
        "inputs": [i["name"] for i in client.get_model_metadata(model)["inputs"]],
    }
    for name, binary in (("binary", True), ("json", False)):
        outputs = [triton.InferRequestedOutput("probability", binary_data=binary)]
        answer = client.infer(model, _inputs(binary), request_id=f"from-{name}", outputs=outputs, timeout=20_000_000)
        said[name] = _told(answer)
    # As most people call it: no outputs named, everything in binary.
    said["plain"] = _told(client.infer(model, _inputs(True), model_version="1"))
    packed = client.infer(model, _inputs(True), request_compression_algorithm="gzip")
    said["gzip"] = _told(packed)
    try:
        client.infer(model, _inputs(True)[:1])
    except InferenceServerException as error:
        said["refused"] = [error.status(), error.message()]
    json.dump(said, sys.stdout)


def _told(answer: "triton.InferResult") -> dict[str, object]:
    told = answer.get_response()
    found = answer.as_numpy("probability")
    return {"id": told["id"], "type": str(found.dtype), "values": found.tolist(), "parameters": told["parameters"]}


def _inputs(binary: bool) -> "list[triton.InferInput]":
    found = []
    for name, kind, values in (
        ("k", "BYTES", np.array(KEYS, dtype=np.object_)),
        ("size", "INT64", np.array(SIZES, dtype=np.int64)),
        ("starts", "BYTES", np.array(STARTS, dtype=np.object_)),
    ):
        tensor = triton.InferInput(name, [len(values)], kind)
        tensor.set_data_from_numpy(values, binary_data=binary)
        found.append(tensor)
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
