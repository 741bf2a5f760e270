"""Model families: rules that say of every parameter name how its tensor lies over an axis, read from TOML."""
