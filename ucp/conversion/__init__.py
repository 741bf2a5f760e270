"""A conversion, from the options to the committed destination."""
