"""Legacy files, written."""
