"""Model families, read from TOML: rules that say, by parameter name, how each axis of a mesh divides the tensor."""
