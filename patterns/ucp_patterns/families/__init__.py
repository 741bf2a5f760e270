"""Model families as TOML files; `ucp.families` reads them through the entry point group `ucp.families`."""
