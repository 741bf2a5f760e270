"""The optimizer files of every ZeRO stage, written."""
