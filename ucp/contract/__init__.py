"""The protocols of formats, targets, patterns and engines, and code that they share."""
