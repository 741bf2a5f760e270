"""Objects in a bucket, read like files in a folder; fsspec is not imported before a URL is used."""
