"""Objects in a bucket, read as files of a folder are; nothing of fsspec is imported before a URL is used."""
