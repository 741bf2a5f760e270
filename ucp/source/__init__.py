"""Opening a source: recognise, read, check, select, rename; conversions and live loaders alike."""
