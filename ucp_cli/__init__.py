"""The command line: one file per verb, each of which parses, calls `ucp.api` and renders."""
