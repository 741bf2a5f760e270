"""Where the bytes of files lie: archives, pickles and headers become references, and references become layouts.

Readers open files read-only, parse indexes, and never touch the bytes of a tensor. Layouts do no input or output.
"""
