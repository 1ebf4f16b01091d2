"""What one server takes; everything above is refused by a code of `headway.serving.http.faults`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests and connections. Times are seconds, sizes bytes.

    `values` and `depth` bound a JSON document; rows are bounded by the declaration (`serving.max_rows`). `longest_s` is
    the longest deadline that a caller may ask for. `drained` is how much of a refused body is read and thrown away, so
    that the refusal reaches a client that is still sending. `in_flight` counts requests whose bodies are there,
    `long_bodies` those that come, of more than `body.LARGE` bytes or of unknown length; the others are bounded by the
    connections.
    """

    body: int = 8 * 1024 * 1024
    body_s: float = 10.0
    header: int = 64 * 1024
    header_s: float = 10.0
    idle_s: int = 30
    drained: int = 256 * 1024 * 1024
    values: int = 200_000
    depth: int = 16
    labels: int = 1_000
    labels_s: float = 10.0
    longest_s: float = 60.0
    in_flight: int = 256
    long_bodies: int = 64
    connections: int = 1_000
    drain_s: float = 20.0
