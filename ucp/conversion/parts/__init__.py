"""One conversion in parts: every part is a separate run of `ucp convert`, on the same or on different machines."""
