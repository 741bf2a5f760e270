"""Where a conversion puts its files, so that nothing half-written looks complete: a folder on disk, or a bucket."""
