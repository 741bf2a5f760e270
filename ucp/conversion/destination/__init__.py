"""Where a conversion puts its files, so that nothing half-written looks whole: a folder of a disk, or a bucket."""
