"""FSDP1's flat parameters, in models (LOCAL_STATE_DICT) and in optimizers."""
