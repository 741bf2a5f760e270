"""What tells one conversion from another: a digest of all that decides what it writes, and the same in words."""

from __future__ import annotations

import json
from dataclasses import asdict

import xxhash

from ucp.contract.companions import Companions
from ucp.conversion.options import ConvertOptions
from ucp.conversion.source.replica_policy import Drift
from ucp.core.index import Index
from ucp.core.target import TargetPlan
from ucp.io.identity import contents_of, producer
from ucp.transfer.plan.job import Job
from ucp.transfer.plan.tasks import BLOCK

__all__ = ["facts_of", "fingerprint_of"]


def facts_of(job: Job, options: ConvertOptions) -> dict[str, str]:
    """What the fingerprint is of, by name, as messages tell it; what was not asked for is left out."""
    asked = {
        "source": job.index.path,
        "target": options.to,
        "topology": str(options.topology or job.target.topology or ""),
        "layout": options.target.layout,
        "compression": "zstd" if options.target.compress else "",
        "dtypes": ", ".join(f"{state}={dtype}" for state, dtype in sorted(options.target.dtypes.items())),
        "settings": ", ".join(f"{name}={value}" for name, value in sorted(options.target.settings.items())),
        "included": ", ".join(options.names.include),
        "left out": ", ".join(options.names.exclude),
        "tag": options.target.tag,
        "new optimizer": options.optimizer or "",
        "companion files": "" if options.companions is Companions.SMALL else options.companions.value,
        "names": ":".join(filter(None, (options.naming.source, options.naming.style))),
        "renamed by": str(options.naming.rules or ""),
        "family": options.source.family or str(options.source.patterns or ""),
        "shapes": str(options.source.shapes_from or ""),
        "order of the optimizer": str(options.source.param_order or ""),
        "of copies that differ": "" if options.drift is Drift.ERROR else options.drift.value,
        "program": producer(),
    }
    return {name: value for name, value in asked.items() if value}


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
        options.to,
        str(options.topology),
        asdict(options.target),
        asdict(options.names),
        [options.naming.style, options.naming.source, str(options.naming.rules)],
        [options.source.family, str(options.source.patterns), options.drift.value, options.companions.value],
        [str(options.source.param_order or "")],
        options.optimizer,
        [(str(path), contents_of(path)) for path in options.own_files],
        literals.hexdigest(),
        BLOCK,
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(asked, sort_keys=True).encode())
