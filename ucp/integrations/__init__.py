"""Resume in other libraries from any checkpoint that `ucp` reads: another framework, number of ranks, or sharding.

from ucp.integrations.transformers import accept_any_checkpoint
from ucp.integrations.accelerate import load_state
from ucp.integrations.lightning import ResumeFrom
from ucp.integrations.torchtitan import ResumingManager
from ucp.integrations.ray_train import resume

A module per library, which is imported with that module and not before. All call `ucp.load_into` on every rank, and
pass further arguments on to it (`ucp.integrations.run.ResumeArguments`).
"""
