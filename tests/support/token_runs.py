"""Runs on tokens and on stored rows with small models, whose ranks note what their engines were really given."""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from support.trainer_runs import Run, Started, layout, start_ranks, toy_spec

from trainer.blobs import canonical_json, digest_bytes
from trainer.events import EventSink
from trainer.spec import (
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    ScheduleSpec,
    TokenDataSpec,
    TokenFile,
    parse_attempt,
    parse_run,
)

VOCAB, CONTEXT, END = 64, 16, 63
MODEL: dict[str, Any] = {
    "vocab": VOCAB,
    "sequence": CONTEXT,
    "dim": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 32,
}
TOKENIZER = b'{"format":"headway.tokenizer/1","kind":"bpe","merges":[]}\n'


def put_blob(store: Path, content: bytes) -> str:
    """Store bytes where the platform's store would keep them; their digest."""
    digest = digest_bytes(content)
    path = store / "sha256" / digest[7:9] / digest[9:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return digest


def shard_of(tokens: int, seed: int) -> NDArray[np.uint16]:
    """So many random tokens, the last of which ends a document."""
    shard = np.random.default_rng(seed).integers(0, END, tokens).astype("<u2")
    shard[-1] = END
    return shard


def put_tokens(store: Path, shards: Mapping[str, Sequence[NDArray[np.uint16]]], **changes: Any) -> TokenDataSpec:  # noqa: ANN401
    """Store shards by split; `changes` are of the spec."""
    files = tuple(
        TokenFile(cast("Any", split), put_blob(store, shard.tobytes()), shard.nbytes, len(shard))
        for split, of_split in shards.items()
        for shard in of_split
    )
    values: dict[str, Any] = {
        "files": files,
        "tokenizer": put_blob(store, TOKENIZER),
        "vocab": VOCAB,
        "context": CONTEXT,
        "end_token": END,
    }
    return TokenDataSpec(**values | changes)


def token_spec(store: Path, engine: str = "ddp", nodes: int = 2, **changes: object) -> RunSpec:
    """A run of 61 windows out of two shards in batches of 8, two epochs of 8 steps, saved each 3 steps."""
    data = put_tokens(store, {"train": [shard_of(500, 1), shard_of(491, 2)], "valid": [shard_of(139, 3)]})
    spread = layout(engine, nodes)
    spec = replace(
        toy_spec(),
        data=data,
        model=ModelSpec(
            file="pipelines/toy/model.py", function="build", code_digest="sha256:" + "0" * 64, options=MODEL
        ),
        layout=replace(spread, zero=2 if engine == "deepspeed" else 0, min_nodes=1 if nodes > 1 else 0),
        optimizer=OptimizerSpec(lr=0.01),
        schedule=ScheduleSpec(epochs=2, checkpoint_every=3, synchronous=True),
    )
    return replace(spec, **cast("dict[str, Any]", changes))


def begin(run: Run, nodes: int, **orders: object) -> list[Started]:
    """Start a new attempt on `nodes` nodes; `orders` are those of `run_noting`."""
    file = run.prepare()
    attempt = replace(parse_attempt(file.read_bytes()), nodes=nodes, store_root=str(run.folder / "store"))
    file.write_bytes(canonical_json(attempt.to_json()))
    run.started = start_ranks("support.token_runs:run_noting", [file] * nodes, orders)
    return run.started


def noted(run: Run) -> dict[tuple[int, int], dict[int, list[str]]]:
    """What the engines were given, by (attempt, place of the step in the attempt) and data rank: digests of samples."""
    found: dict[tuple[int, int], dict[int, list[str]]] = {}
    for file in sorted(run.folder.glob("attempts/*/given-*.jsonl")):
        for line in file.read_text().splitlines():
            index, part, samples = json.loads(line)
            found.setdefault((int(file.parent.name), index), {})[part] = samples
    return found


def judged(run: Run) -> list[list[str]]:
    """The validation losses of the newest attempt to the last bit, by rank."""
    files = sorted(run.attempt_folder.glob("judged-*.jsonl"))
    return [[float(line).hex() for line in file.read_text().splitlines()] for file in files]


def content_of(parts: Sequence[Any]) -> str:
    """Digest of a sample's values."""
    return hashlib.sha256(b"|".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()[:16]


# Inside of the forked processes.


def run_noting(kill: Mapping[str, int] | None = None, ask: Mapping[str, int] | None = None) -> int:
    """A rank whose engine notes the samples of each step before it learns from them.

    `kill` {rank, step}: the rank that kills itself with -9 in a step, counted from 0 in this process. `ask`
    {rank, step}: the rank that is asked to stop in a step.
    """
    import trainer.rank
    from trainer.worker import StopRequest, run

    file = Path(os.environ["TRAINER_ATTEMPT"])
    stop = StopRequest(file.parent / "cancel")
    stop.install()
    sink = EventSink.from_environment()
    attempt = parse_attempt(file.read_bytes())
    spec = parse_run((Path(attempt.run_dir) / "spec.json").read_bytes())
    plain: Any = trainer.rank.make_engine
    unchecked: Any = trainer.rank
    unchecked.make_engine = lambda *given: _noting(plain(*given), file.parent, kill or {}, ask or {})
    unchecked.write_language = _write_network
    _note_judgements(file.parent)
    return run(attempt, spec, sink, stop, step_event_every_s=0.0, parts=_parts())


def _noting(engine: Any, folder: Path, kill: Mapping[str, int], ask: Mapping[str, int]) -> Any:  # noqa: ANN401
    rank, steps, plain = int(os.environ["RANK"]), 0, engine.step

    def step(batches: Sequence[Any], *more: Any) -> Any:  # noqa: ANN401
        nonlocal steps
        samples = [sample for batch in batches for sample in _samples(batch)]
        with (folder / f"given-{rank}.jsonl").open("a") as target:
            target.write(json.dumps([steps, engine.mesh.data_index, samples]) + "\n")
        if kill.get("rank") == rank and kill["step"] == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        if ask.get("rank") == rank and ask["step"] == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        steps += 1
        return plain(batches, *more)

    engine.step = step
    return engine


def _note_judgements(folder: Path) -> None:
    from trainer.loop import Trainer

    plain, file = Trainer.validate, folder / f"judged-{os.environ['RANK']}.jsonl"

    def noting(trainer: Any) -> dict[str, Any]:  # noqa: ANN401
        found = plain(trainer)
        with file.open("a") as target:
            target.write(f"{found['valid_loss']!r}\n")
        return found

    unchecked: Any = Trainer
    unchecked.validate = noting


def _samples(batch: Any) -> list[str]:  # noqa: ANN401
    from trainer.batches import TokenBatch

    weight = batch.weight
    parts = (batch.given, batch.target) if isinstance(batch, TokenBatch) else (batch.numeric, batch.categorical)
    rows = range(len(parts[0]))
    return [content_of([p[i].numpy() for p in parts]) for i in rows if weight is None or bool((weight[i] > 0).any())]


def _parts() -> Any:  # noqa: ANN401 - trainer.rank.Parts
    from trainer.models.decoder import DecoderOptions, decoder_plan
    from trainer.models.factory import one_group
    from trainer.rank import Parts

    def plan(spec: RunSpec, _: Path) -> Any:  # noqa: ANN401
        return decoder_plan(DecoderOptions.parse(spec.model.options)) if isinstance(spec.data, TokenDataSpec) else None

    groups: Callable[..., Any] = lambda spec, model, _: one_group(model, spec.optimizer)  # noqa: E731
    return Parts(
        build_model=_build,
        parameter_groups=groups,
        parallel_plan=plan,
        write_network=_write_network,
        fit_logistic=lambda *_, **__: _no_artifact(),
    )


def _build(spec: RunSpec, inputs: Any, _: Path) -> Any:  # noqa: ANN401
    import torch
    from torch import nn

    from trainer.models.decoder import Decoder, DecoderOptions

    class Numbers(nn.Module):
        """A logistic regression on the numbers of a row."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.leave = nn.Linear(width, 1)

        def forward(self, numeric: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return self.leave(numeric).squeeze(1)

    if isinstance(spec.data, TokenDataSpec):
        return Decoder(DecoderOptions.parse(spec.model.options))
    return Numbers(inputs.numeric_width)


def _write_network(*_: object, **__: object) -> Any:  # noqa: ANN401
    return _no_artifact()


def _no_artifact() -> Any:  # noqa: ANN401
    from trainer.blobs import Manifest

    return Manifest(())
