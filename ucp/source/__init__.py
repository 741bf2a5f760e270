"""Opening a source, for conversions and live loaders: recognise, read, check, select, rename."""
