"""What tells one conversion from another: a digest of all that decides what it writes, and the same in words."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from ucp.conversion.options import OPTIONS, ConvertOptions
from ucp.core.index import Index
from ucp.core.target import TargetPlan
from ucp.io.identity import contents_of, producer
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import BLOCK

__all__ = ["facts_of", "fingerprint_of"]


def facts_of(job: Job, options: ConvertOptions) -> dict[str, str]:
    """What the fingerprint is of, by name, as messages tell it; what was not asked for is left out."""
    facts = {"source": job.index.path}
    for option in OPTIONS.values():
        value = getattr(options, option.name)
        if option.identity and value not in (None, option.default):
            facts[option.identity] = _text(value)
    topology = str(options.topology or job.target.topology or "")
    facts |= {**({"topology": topology} if topology else {}), "target": options.to, "program": producer()}
    return facts


def _text(value: object) -> str:
    """A value of an option, in words."""
    match value:
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{name}={member}" for name, member in sorted(value.items()))
        case tuple():
            return ", ".join(map(str, value))
    return str(value)


def fingerprint_of(index: Index, plan: TargetPlan, options: ConvertOptions) -> str:
    """Digest of all that decides what is written: of files of the user's own the contents, which may be edited."""
    literals = xxhash.xxh3_128()
    for file in plan.files:  # with what the target took from elsewhere, such as a config.json
        literals.update(repr((file.path, file.nbytes, [part.offset for part in file.literals])).encode())
        for part in file.literals:
            literals.update(part.data)
    asked = [
        producer(),
        index.format,
        sorted((file.path, file.nbytes, file.mtime_ns, *filter(None, (file.version,))) for file in index.files),
        {
            option.identity: contents_of(value) if isinstance(value, Path) else value
            for option in OPTIONS.values()
            if option.identity and (value := getattr(options, option.name)) is not None
        },
        literals.hexdigest(),
        BLOCK,
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(asked, sort_keys=True, default=str).encode())
