"""Types of the fields of control operations: what `Server.register_control` checks arguments against."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

CallId = Annotated[int, Meta(ge=1, le=2**63 - 1)]

WorkerName = Annotated[str, Meta(min_length=1, max_length=1024)]
"""Long enough for any `Limits.name_bytes` that makes sense."""

Group = Annotated[list[WorkerName], Meta(min_length=1, max_length=65_536)]
"""Names of workers; there cannot be more ranks."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]

Codec = Annotated[int, Meta(ge=0, le=5)]
"""How a packed value is encoded; see `gradwire.wire.objects`."""

EncodedAddress = Annotated[bytes, Meta(max_length=32_768)]
"""For `gradwire.wire.addresses.decode_address`."""

WorldSize = Annotated[int, Meta(ge=1, le=65_536)]
