"""Where bytes lie in files: reads archives, pickles and headers into references to bytes, and lays out new files.

Readers open files read-only, parse indexes, and never touch the bytes of a tensor. Laying out does no input or output.
"""
