"""Reports as pages for a browser: one file each, without a network."""
